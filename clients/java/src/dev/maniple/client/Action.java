package dev.maniple.client;

import io.grpc.Status;

/** What follows a problem. */
public enum Action {
  /** It is the caller's. */
  GIVE_UP,
  /** The same request with the same id: it did not begin, and an id is admitted once. */
  SEND_AGAIN,
  /** Take it up where it broke, perhaps at another server. */
  RESUME,
  /** What had begun is gone: a new request with a new id. */
  START_OVER;

  /**
   * The table of docs/errors.md, as far as it can be acted on.
   *
   * @param begun the stream brought {@code started}, and with it the right to resume
   * @param sentBefore this id was sent once already
   */
  static Action after(Problem problem, boolean begun, boolean sentBefore) {
    String reason = problem.reason();
    boolean aborted = problem.code() == Status.Code.ABORTED;
    boolean groupLost = aborted && reason.equals("GROUP_LOST");
    boolean takenOver = aborted && reason.equals("TAKEN_OVER");
    boolean gone = problem.isTransportLoss() || problem.code() == Status.Code.UNAVAILABLE;
    if (begun) {
      if (gone || takenOver) {
        return RESUME;
      }
      return groupLost || reason.equals("RESUME_LOST") || reason.equals("UNKNOWN_REQUEST") ? START_OVER : GIVE_UP;
    }
    if (gone || (problem.code() == Status.Code.RESOURCE_EXHAUSTED && !reason.isEmpty())) {
      return SEND_AGAIN;
    }
    if (groupLost || takenOver) {
      return START_OVER; // it ran, but nothing of it reached us
    }
    // The first try had been admitted, and ended with its connection.
    return reason.equals("DUPLICATE_REQUEST") && sentBefore ? START_OVER : GIVE_UP;
  }
}
