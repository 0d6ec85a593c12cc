package dev.maniple.cli;

import static dev.maniple.cli.Printer.facts;

import dev.maniple.client.Action;
import dev.maniple.client.Event;
import dev.maniple.client.GenerationStream;
import dev.maniple.client.Problem;
import dev.maniple.client.Servers;
import dev.maniple.v1.AbortRequest;
import dev.maniple.v1.GetModelRequest;
import dev.maniple.v1.GetStatusRequest;
import dev.maniple.v1.GroupStatus;
import dev.maniple.v1.TokenizeRequest;
import io.grpc.StatusRuntimeException;
import java.util.Map;

/** Maniple from the command line, in Java: streams a generation and does about errors what can be done about them. */
public final class Main {
  private Main() {}

  /** Exits with 0 when done or cancelled as asked, 1 when a call failed, 2 when the command line is wrong. */
  public static void main(String[] arguments) {
    int code;
    try {
      code = run(new Settings(arguments));
    } catch (Settings.UsageError error) {
      System.err.println("maniple-java: " + error.getMessage() + "; see maniple-java --help");
      code = 2;
    } catch (InterruptedException error) {
      code = 130;
    }
    System.exit(code);
  }

  private static int run(Settings settings) throws InterruptedException {
    if (settings.has("help") || settings.words.isEmpty()) {
      System.err.print(Settings.USAGE);
      return settings.has("help") ? 0 : 2;
    }
    Printer printer = new Printer(settings.has("json"));
    try (Servers servers = new Servers(settings.targets(), settings.transport(), settings.caller())) {
      if (settings.words.size() == 1 && settings.words.get(0).equals("generate")) {
        generate(servers, settings, printer);
      } else {
        printer.answer(ask(servers, settings));
      }
      return 0;
    } catch (StatusRuntimeException error) {
      printer.failed(Problem.of(error));
    } catch (Problem problem) {
      printer.failed(problem);
    }
    return 1;
  }

  private static void generate(Servers servers, Settings settings, Printer printer)
      throws Problem, InterruptedException {
    int cancelAfter = settings.cancelAfter();
    int numTokens = 0;
    try (var stream =
        new GenerationStream(servers, settings.request(), settings.deadline(), settings.patience())) {
      for (Event event; (event = stream.next()) != null; ) {
        if (event instanceof Event.Message message) {
          printer.message(message.response());
          numTokens += message.response().getChunk().getTokenIdsCount();
          if (cancelAfter > 0 && numTokens >= cancelAfter) {
            printer.answer(facts("event", "cancelled"));
            return; // leaving the block cancels
          }
        } else if (event instanceof Event.Recovering recovering) {
          printer.recovering(recovering);
          if (recovering.action() == Action.START_OVER) {
            numTokens = 0;
          }
        }
      }
    }
  }

  /** Makes a call that is answered once. */
  private static Map<String, Object> ask(Servers servers, Settings settings) {
    var inference = servers.inference().withDeadline(settings.deadline());
    String verb = settings.words.get(0);
    int numArguments = settings.words.size() - 1;
    if (verb.equals("abort") && numArguments == 1) {
      var answer = inference.abort(AbortRequest.newBuilder().setRequestId(settings.words.get(1)).build());
      return facts("event", "aborted", "was_running", answer.getWasRunning());
    }
    if (verb.equals("tokenize") && numArguments == 1) {
      var answer = inference.tokenize(TokenizeRequest.newBuilder().setText(settings.words.get(1)).build());
      return facts("event", "tokens", "token_ids", answer.getTokenIdsList());
    }
    if (verb.equals("model") && numArguments == 0) {
      var answer = inference.getModel(GetModelRequest.getDefaultInstance());
      return facts("event", "model", "names", answer.getServedNamesList().stream().toList(),
          "max_model_len", answer.getMaxModelLen(), "vocab_size", answer.getVocabSize());
    }
    if (verb.equals("status") && numArguments == 0) {
      var admin = servers.admin().withDeadline(settings.deadline());
      var answer = admin.getStatus(GetStatusRequest.getDefaultInstance());
      var groups = answer.getGroupsList();
      return facts("event", "status", "ready", answer.getReady(), "why_not", answer.getNotReadyReason(),
          "num_running", groups.stream().mapToInt(GroupStatus::getNumRunning).sum(),
          "num_waiting", groups.stream().mapToInt(GroupStatus::getNumWaiting).sum());
    }
    throw new Settings.UsageError("no such verb, or not its arguments: " + String.join(" ", settings.words));
  }
}
