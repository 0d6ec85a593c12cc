package dev.maniple.client;

import dev.maniple.v1.GenerateResponse;
import java.time.Duration;

/** What a stream yields. */
public sealed interface Event {
  /** Started, chunk, finished or done, as it came. */
  record Message(GenerateResponse response) implements Event {}

  /** The stream broke and something is done about it. With START_OVER, what came before is void. */
  record Recovering(Action action, Problem problem, Duration delay, String target) implements Event {}
}
