package dev.maniple.cli;

import dev.maniple.client.Patience;
import dev.maniple.v1.GenerateRequest;
import dev.maniple.v1.TokenIds;
import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.Deadline;
import io.grpc.InsecureChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** What the command line asks for. */
final class Settings {
  static final String USAGE =
      """
      usage: maniple-java VERB [flags]

        generate              stream a generation of --prompt or --token-ids
        abort ID              end a running request
        tokenize TEXT         show the token ids of a text
        model                 show what is served
        status                show what the server is doing

      flags:
        --target HOST:PORT    the server, or several with commas (or MANIPLE_SERVER; default 127.0.0.1:50051)
        --prompt TEXT         text to continue
        --token-ids IDS       ids to continue, with commas
        --request-id ID       id of the request (default: drawn)
        --max-tokens N        at most so many tokens (default 64)
        --temperature T       0 is greedy (default: the server's)
        --seed N              fixes what is sampled (default: none)
        --ignore-eos          go on after the end of text
        --deadline S          end the request after so many seconds (default: never)
        --cancel-after N      cancel after so many tokens (default: never)
        --retry-for S         give up after so many seconds without a word (default 30)
        --start-over N        begin anew so often when what had begun is lost (default 1)
        --detach-grace S      the request goes on so many seconds without a connection (default 0)
        --tls-ca FILE         use TLS, and trust the certificates in this file
        --token-file FILE     send the bearer token in this file (needs --tls-ca)
        --json                print one JSON object a line
      """;

  /** The command line is wrong. */
  static final class UsageError extends RuntimeException {
    private static final long serialVersionUID = 1;

    UsageError(String message) {
      super(message);
    }
  }

  private static final Set<String> SWITCHES = Set.of("ignore-eos", "json", "help");
  private static final Set<String> VALUES =
      Set.of("target", "prompt", "token-ids", "request-id", "max-tokens", "temperature", "seed", "deadline",
          "cancel-after", "retry-for", "start-over", "detach-grace", "tls-ca", "token-file");

  final List<String> words = new ArrayList<>(); // the verb and its arguments
  private final Map<String, String> flags = new HashMap<>();

  Settings(String[] arguments) {
    for (int at = 0; at < arguments.length; at++) {
      if (!arguments[at].startsWith("--")) {
        words.add(arguments[at]);
        continue;
      }
      String[] parts = arguments[at].substring(2).split("=", 2);
      if (SWITCHES.contains(parts[0]) && parts.length == 1) {
        flags.put(parts[0], "true");
      } else if (!VALUES.contains(parts[0])) {
        throw new UsageError("no such flag: --" + parts[0]);
      } else if (parts.length == 2) {
        flags.put(parts[0], parts[1]);
      } else if (++at < arguments.length) {
        flags.put(parts[0], arguments[at]);
      } else {
        throw new UsageError("--" + parts[0] + " lacks its value");
      }
    }
  }

  boolean has(String flag) {
    return flags.containsKey(flag);
  }

  List<String> targets() {
    String server = System.getenv("MANIPLE_SERVER");
    return List.of(
        flags.getOrDefault("target", server == null || server.isEmpty() ? "127.0.0.1:50051" : server).split(","));
  }

  int cancelAfter() {
    return number("cancel-after", Integer::parseInt, 0);
  }

  Patience patience() {
    double seconds = number("retry-for", Double::parseDouble, 30.0);
    return new Patience(Duration.ofMillis((long) (seconds * 1000)), number("start-over", Integer::parseInt, 1));
  }

  /** Counts from now. */
  Deadline deadline() {
    double seconds = number("deadline", Double::parseDouble, 0.0);
    return seconds > 0 ? Deadline.after((long) (seconds * 1e6), TimeUnit.MICROSECONDS) : null;
  }

  GenerateRequest request() {
    var request = GenerateRequest.newBuilder().setRequestId(flags.getOrDefault("request-id", ""));
    var sampling = request.getSamplingBuilder();
    sampling.setMaxTokens(number("max-tokens", Integer::parseUnsignedInt, 64));
    sampling.setIgnoreEos(has("ignore-eos"));
    if (has("temperature")) {
      sampling.setTemperature(number("temperature", Float::parseFloat, 0f));
    }
    if (has("seed")) {
      sampling.setSeed(number("seed", Long::parseUnsignedLong, 0L));
    }
    request.setDetachGraceS(number("detach-grace", Float::parseFloat, 0f));
    if (!has("token-ids")) {
      return request.setText(flags.getOrDefault("prompt", "")).build();
    }
    var ids = TokenIds.newBuilder();
    for (String word : flags.get("token-ids").split(",")) {
      ids.addIds(read("token-ids", word.strip(), Integer::parseUnsignedInt));
    }
    return request.setTokenIds(ids).build();
  }

  ChannelCredentials transport() {
    if (!has("tls-ca")) {
      return InsecureChannelCredentials.create();
    }
    try {
      return TlsChannelCredentials.newBuilder().trustManager(new File(flags.get("tls-ca"))).build();
    } catch (IOException error) {
      throw new UsageError("cannot read " + flags.get("tls-ca"));
    }
  }

  /** Who calls; null for nobody in particular. */
  CallCredentials caller() {
    if (!has("token-file")) {
      return null;
    }
    if (!has("tls-ca")) {
      throw new UsageError("--token-file needs --tls-ca");
    }
    return new Bearer(Path.of(flags.get("token-file")));
  }

  private <T> T number(String flag, Function<String, T> parse, T unset) {
    return has(flag) ? read(flag, flags.get(flag), parse) : unset;
  }

  private static <T> T read(String flag, String word, Function<String, T> parse) {
    try {
      return parse.apply(word);
    } catch (NumberFormatException error) {
      throw new UsageError("--" + flag + ": \"" + word + "\" is no number");
    }
  }
}
