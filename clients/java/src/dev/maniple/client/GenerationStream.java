package dev.maniple.client;

import com.google.common.base.Utf8;
import dev.maniple.v1.AbortRequest;
import dev.maniple.v1.GenerateRequest;
import dev.maniple.v1.GenerateResponse;
import dev.maniple.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.maniple.v1.ResumeRequest;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/**
 * One generation, whatever happens to the servers under it. For one thread. Closing it cancels what still runs: the
 * server frees what it held within a step.
 */
public final class GenerationStream implements AutoCloseable {
  private final Servers servers;
  private final Deadline deadline;
  private final Recovery recovery;
  private final Context.CancellableContext context = Context.current().withCancellation();
  private GenerateRequest request;
  private Iterator<GenerateResponse> call;
  private Problem inBand;
  private Duration delay = Duration.ZERO; // before the next call
  private boolean sentBefore;
  private boolean isDone; // nothing more comes
  private boolean hasEnded; // the server knows that

  // What came so far; it is resumed from here.
  private GenerateResponse.Started started;
  private final Map<Integer, ResumeRequest.Cursor.Builder> cursors = new HashMap<>();
  private final Set<Integer> finished = new HashSet<>();

  /**
   * Begins a generation with the first {@link #next}.
   *
   * @param deadline when the server ends the request; null for never
   */
  public GenerationStream(Servers servers, GenerateRequest request, Deadline deadline, Patience patience) {
    this.servers = servers;
    this.deadline = deadline;
    this.recovery = new Recovery(patience);
    // An id of ours, so that sending it again cannot run it twice.
    this.request = request.getRequestId().isEmpty() ? withNewId(request) : request;
  }

  /** Waits for the next event; null after the last one of a good stream. */
  public Event next() throws Problem, InterruptedException {
    while (!isDone) {
      try {
        if (call == null) {
          open();
        }
        if (call.hasNext()) {
          GenerateResponse response = call.next();
          if (isNews(response)) {
            recovery.heard();
            isDone = response.hasDone();
            hasEnded = isDone;
            return new Event.Message(response);
          }
          continue;
        }
        Status early = Status.UNAVAILABLE.withDescription("the stream ended before its last message");
        return goOn(inBand != null ? inBand : Problem.of(early));
      } catch (StatusRuntimeException error) {
        return goOn(Problem.richer(inBand, Problem.of(error)));
      }
    }
    return null;
  }

  @Override
  public void close() {
    isDone = true;
    context.cancel(null);
    if (started != null && !hasEnded && request.getDetachGraceS() > 0) {
      // The server was asked to go on when a connection ends, so it must be told.
      var abort = AbortRequest.newBuilder().setRequestId(request.getRequestId()).build();
      try {
        servers.inference().withDeadlineAfter(5, TimeUnit.SECONDS).abort(abort);
      } catch (StatusRuntimeException notNeeded) {
        // Who cannot be told runs nothing, or ends it when the grace is over.
      }
    }
  }

  /** Begins the next call: Generate, or Resume once the request has begun. */
  private void open() throws InterruptedException {
    TimeUnit.NANOSECONDS.sleep(delay.toNanos());
    inBand = null;
    InferenceServiceBlockingStub stub = servers.inference().withDeadline(deadline);
    context.run(() -> call = started == null ? stub.generate(request) : resume(stub));
  }

  private Iterator<GenerateResponse> resume(InferenceServiceBlockingStub stub) {
    ResumeRequest.Builder resume =
        ResumeRequest.newBuilder()
            .setRequestId(started.getRequestId())
            .setResumeToken(started.getResumeToken());
    cursors.values().forEach(resume::addCursors);
    var responses = stub.resume(resume.build());
    return new Iterator<>() {
      @Override
      public boolean hasNext() {
        return responses.hasNext();
      }

      @Override
      public GenerateResponse next() {
        return responses.next().getResponse();
      }
    };
  }

  /** Keeps what a message says. A resumed stream says again what began and what ended; that is no news. */
  private boolean isNews(GenerateResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> {
        if (started != null) {
          return false;
        }
        started = response.getStarted();
      }
      case CHUNK -> {
        var chunk = response.getChunk();
        count(chunk.getIndex(), chunk.getTokenIdsCount(), chunk.getText());
      }
      case FINISHED -> {
        var ended = response.getFinished();
        if (!finished.add(ended.getIndex())) {
          return false;
        }
        count(ended.getIndex(), ended.getTokenIdsCount(), ended.getText());
      }
      case DONE -> {}
      case ERROR -> {
        inBand = Problem.inBand(response.getError());
        return false;
      }
      default -> {
        return false; // an event of a newer server
      }
    }
    return true;
  }

  private void count(int index, int numTokens, String text) {
    var cursor = cursors.computeIfAbsent(index, one -> ResumeRequest.Cursor.newBuilder().setIndex(one));
    cursor.setNumTokens(cursor.getNumTokens() + numTokens);
    cursor.setNumTextBytes(cursor.getNumTextBytes() + Utf8.encodedLength(text));
  }

  /** Decides what is done about a problem. It waits before the next call, but not beyond the deadline. */
  private Event goOn(Problem problem) throws Problem {
    call = null;
    var step = recovery.after(problem, System.nanoTime(), started != null, sentBefore);
    boolean isLate =
        deadline != null && deadline.timeRemaining(TimeUnit.NANOSECONDS) <= step.delay().toNanos();
    if (step.action() == Action.GIVE_UP || isDone || isLate) {
      isDone = true;
      hasEnded = !problem.reason().isEmpty();
      throw problem;
    }
    if (step.action() == Action.START_OVER) {
      request = withNewId(request); // the old id is taken for a minute
      started = null;
      cursors.clear();
      finished.clear();
      servers.now().channel().resetConnectBackoff();
    } else {
      servers.move(problem.ownerAddress());
    }
    sentBefore = step.action() == Action.SEND_AGAIN;
    delay = step.delay();
    return new Event.Recovering(step.action(), problem, delay, servers.now().target());
  }

  private static GenerateRequest withNewId(GenerateRequest request) {
    return request.toBuilder().setRequestId(UUID.randomUUID().toString()).build();
  }
}
