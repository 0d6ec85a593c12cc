package dev.maniple.client;

import dev.maniple.v1.AdminServiceGrpc;
import dev.maniple.v1.InferenceServiceGrpc;
import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.ManagedChannel;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;

/** One or several servers of the same model, any of which may take over from another. */
public final class Servers implements AutoCloseable {
  /** One server. */
  record Server(
      String target,
      ManagedChannel channel,
      InferenceServiceGrpc.InferenceServiceBlockingStub inference,
      AdminServiceGrpc.AdminServiceBlockingStub admin) {}

  private final ChannelCredentials transport;
  private final CallCredentials caller;
  private final List<Server> all = new ArrayList<>();
  private int present;

  /**
   * Connects in the background.
   *
   * @param targets "host:port"; the first is preferred
   * @param caller who calls; null for nobody in particular
   */
  public Servers(List<String> targets, ChannelCredentials transport, CallCredentials caller) {
    this.transport = transport;
    this.caller = caller;
    targets.forEach(this::add);
  }

  /** The calls that are asked and answered once. */
  public InferenceServiceGrpc.InferenceServiceBlockingStub inference() {
    return now().inference();
  }

  /** The calls of operators. */
  public AdminServiceGrpc.AdminServiceBlockingStub admin() {
    return now().admin();
  }

  Server now() {
    return all.get(present);
  }

  /** Turns to the server that was named as the owner of a request, or else to the next in turn. */
  void move(String owner) {
    if (owner.isEmpty()) {
      present = (present + 1) % all.size();
    } else {
      int known = all.stream().map(Server::target).toList().indexOf(owner);
      present = known >= 0 ? known : add(owner);
    }
    // gRPC waits up to two minutes before it connects again, and in Java that cannot be set. It can be cut short.
    now().channel().resetConnectBackoff();
  }

  private int add(String target) {
    ManagedChannel channel =
        Grpc.newChannelBuilder(target, transport)
            // Retries are decided by us, who know what has begun. gRPC's own would not know.
            .disableRetry()
            // Finds a dead peer while a generation is silent. Proxies do not count pings as traffic.
            .keepAliveTime(30, TimeUnit.SECONDS)
            .keepAliveTimeout(10, TimeUnit.SECONDS)
            // Answers with log-probabilities may be longer than the default of 4 MiB.
            .maxInboundMessageSize(64 << 20)
            .build();
    var inference = InferenceServiceGrpc.newBlockingStub(channel).withCallCredentials(caller);
    var admin = AdminServiceGrpc.newBlockingStub(channel).withCallCredentials(caller);
    all.add(new Server(target, channel, inference, admin));
    return all.size() - 1;
  }

  /** Ends the connections; what still streams is cancelled. */
  @Override
  public void close() {
    all.forEach(server -> server.channel().shutdownNow());
  }
}
