package dev.maniple.client;

import java.time.Duration;
import java.util.concurrent.ThreadLocalRandom;

/** Counts the attempts of one stream. Whatever the stream brings starts the count anew. Time is an argument. */
final class Recovery {
  private static final Duration FIRST_DELAY = Duration.ofMillis(50);
  private static final Duration LAST_DELAY = Duration.ofSeconds(1);

  /** What to do, and after how long. */
  record Step(Action action, Duration delay) {
    static final Step GIVE_UP = new Step(Action.GIVE_UP, Duration.ZERO);
  }

  private final Duration retryFor;
  private int startsOverLeft;
  private boolean isBroken;
  private long brokenSinceNanos;
  private Duration delay = FIRST_DELAY;

  Recovery(Patience patience) {
    retryFor = patience.retryFor();
    startsOverLeft = patience.startsOver();
  }

  void heard() {
    isBroken = false;
    delay = FIRST_DELAY;
  }

  Step after(Problem problem, long nowNanos, boolean begun, boolean sentBefore) {
    Action action = Action.after(problem, begun, sentBefore);
    if (action == Action.START_OVER && startsOverLeft-- <= 0) {
      return Step.GIVE_UP;
    }
    if (!isBroken) {
      isBroken = true;
      brokenSinceNanos = nowNanos;
    }
    if (action == Action.GIVE_UP || nowNanos - brokenSinceNanos >= retryFor.toNanos()) {
      return Step.GIVE_UP;
    }
    Duration now = delay.compareTo(problem.retryAfter()) < 0 ? problem.retryAfter() : delay;
    Duration next = delay.multipliedBy(2);
    delay = next.compareTo(LAST_DELAY) < 0 ? next : LAST_DELAY;
    // Up to a fifth more, so that clients that broke together do not come back together.
    return new Step(action, now.plusNanos(ThreadLocalRandom.current().nextLong(now.toNanos() / 5 + 1)));
  }
}
