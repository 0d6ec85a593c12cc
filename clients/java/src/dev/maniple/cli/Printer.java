package dev.maniple.cli;

import dev.maniple.client.Event;
import dev.maniple.client.Problem;
import dev.maniple.v1.GenerateResponse;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.stream.Collectors;

/** Shows what happens: text to standard output and the rest to standard error, or everything as JSON lines. */
final class Printer {
  // Not System.out, which writes in whatever encoding the terminal is said to have.
  private static final PrintStream OUT =
      new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

  private final boolean json;

  Printer(boolean json) {
    this.json = json;
  }

  void message(GenerateResponse response) {
    switch (response.getEventCase()) {
      case STARTED -> {
        var started = response.getStarted();
        line(facts("event", "started", "request_id", started.getRequestId(),
            "num_prompt_tokens", started.getNumPromptTokens(), "num_cached_tokens", started.getNumCachedTokens()));
      }
      case CHUNK -> {
        var chunk = response.getChunk();
        line(facts("event", "chunk", "index", chunk.getIndex(), "token_ids", chunk.getTokenIdsList(),
            "text", chunk.getText()));
        text(chunk.getText());
      }
      case FINISHED -> {
        var finished = response.getFinished();
        String reason = finished.getReason().name().replace("FINISH_REASON_", "").toLowerCase(Locale.ROOT);
        line(facts("event", "finished", "index", finished.getIndex(), "reason", reason,
            "num_output_tokens", finished.getNumOutputTokens()));
      }
      case DONE -> {
        var done = response.getDone();
        line(facts("event", "done", "num_output_tokens", done.getNumOutputTokens(),
            "duration_s", done.getDurationS()));
        text("\n");
      }
      default -> {}
    }
  }

  void recovering(Event.Recovering event) {
    String what =
        switch (event.action()) {
          case SEND_AGAIN -> "sending_again";
          case RESUME -> "resuming";
          case START_OVER -> "starting_over";
          case GIVE_UP -> "giving_up";
        };
    double seconds = event.delay().toNanos() / 1e9;
    var facts = facts("event", what, "delay_s", seconds, "target", event.target());
    facts.putAll(facts(event.problem()));
    line(facts);
    if (!json) {
      String words = what.replace('_', ' ');
      System.err.printf("%n[%s: %s in %.2f s at %s]%n", event.problem(), words, seconds, event.target());
    }
  }

  void answer(Map<String, Object> facts) {
    line(facts);
    if (!json) {
      facts.forEach((name, value) -> {
        if (!name.equals("event")) {
          OUT.println(name + ": " + value);
        }
      });
    }
  }

  void failed(Problem problem) {
    var facts = facts("event", "error");
    facts.putAll(facts(problem));
    line(facts);
    if (!json) {
      System.err.println("\n" + problem);
    }
  }

  /** Names and values in turn. */
  static Map<String, Object> facts(Object... namesAndValues) {
    Map<String, Object> facts = new LinkedHashMap<>();
    for (int at = 0; at < namesAndValues.length; at += 2) {
      facts.put((String) namesAndValues[at], namesAndValues[at + 1]);
    }
    return facts;
  }

  private static Map<String, Object> facts(Problem problem) {
    var violations =
        problem.violations().stream()
            .map(one -> facts("field", one.field(), "description", one.description()))
            .toList();
    return facts("status", problem.code().name(), "reason", problem.reason(), "message", problem.getMessage(),
        "violations", violations, "incident_id", problem.incidentId());
  }

  private void text(String text) {
    if (!json) {
      OUT.print(text);
      OUT.flush();
    }
  }

  private void line(Map<String, Object> facts) {
    if (json) {
      OUT.println(json(facts));
    }
  }

  private static String json(Object value) {
    if (value instanceof Map<?, ?> map) {
      return map.entrySet().stream()
          .map(one -> json(one.getKey()) + ":" + json(one.getValue()))
          .collect(Collectors.joining(",", "{", "}"));
    }
    if (value instanceof List<?> list) {
      return list.stream().map(Printer::json).collect(Collectors.joining(",", "[", "]"));
    }
    return value instanceof String text ? quoted(text) : String.valueOf(value);
  }

  private static String quoted(String text) {
    StringBuilder quoted = new StringBuilder("\"");
    for (char c : text.toCharArray()) {
      if (c == '"' || c == '\\') {
        quoted.append('\\').append(c);
      } else if (c < ' ') {
        quoted.append(String.format("\\u%04x", (int) c));
      } else {
        quoted.append(c);
      }
    }
    return quoted.append('"').toString();
  }
}
