package dev.maniple.cli;

import io.grpc.CallCredentials;
import io.grpc.Metadata;
import io.grpc.Status;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.Executor;

/** Sends a bearer token, read for each call: it may be renewed. */
final class Bearer extends CallCredentials {
  private static final Metadata.Key<String> KEY = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private final Path file;

  Bearer(Path file) {
    this.file = file;
  }

  @Override
  public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
    executor.execute(
        () -> {
          try {
            Metadata headers = new Metadata();
            headers.put(KEY, "Bearer " + Files.readString(file).strip());
            applier.apply(headers);
          } catch (IOException error) {
            applier.fail(Status.UNAUTHENTICATED.withDescription("cannot read " + file));
          }
        });
  }

  @Override
  public void thisUsesUnstableApi() {}
}
