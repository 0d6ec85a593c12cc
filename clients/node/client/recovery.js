// What follows a problem. Pure: time is an argument.

/** The problem is the caller's. */
export const GIVE_UP = "giving_up";
/** The same request with the same id: it did not begin, and an id is admitted once. */
export const SEND_AGAIN = "sending_again";
/** Take it up where it broke, perhaps at another server. */
export const RESUME = "resuming";
/** What had begun is gone: a new request with a new id. */
export const START_OVER = "starting_over";

const FIRST_DELAY_MS = 50;
const LAST_DELAY_MS = 1000;

/**
 * The table of docs/errors.md, as far as it can be acted on.
 *
 * @param {import("./problem.js").Problem} problem
 * @param {boolean} begun the stream brought `started`, and with it the right to resume
 * @param {boolean} sentBefore this id was sent once already
 */
export function actionAfter(problem, begun, sentBefore) {
  const { status, reason } = problem;
  const groupLost = status === "ABORTED" && reason === "GROUP_LOST";
  const takenOver = status === "ABORTED" && reason === "TAKEN_OVER";
  if (begun) {
    if (problem.isTransportLoss || status === "UNAVAILABLE" || takenOver) return RESUME;
    if (groupLost || reason === "RESUME_LOST" || reason === "UNKNOWN_REQUEST") return START_OVER;
    return GIVE_UP;
  }
  if (problem.isTransportLoss || status === "UNAVAILABLE") return SEND_AGAIN;
  if (status === "RESOURCE_EXHAUSTED" && reason !== "") return SEND_AGAIN;
  if (groupLost || takenOver) return START_OVER; // it ran, but nothing of it reached us
  if (reason === "DUPLICATE_REQUEST" && sentBefore) return START_OVER; // the first try ended with its connection
  return GIVE_UP;
}

/** Counts the attempts of one stream. Whatever the stream brings starts the count anew. */
export class Recovery {
  #brokenSince = null;
  #delayMs = FIRST_DELAY_MS;

  constructor({ giveUpAfterMs, startsOver }) {
    this.giveUpAfterMs = giveUpAfterMs;
    this.startsOverLeft = startsOver;
  }

  heard() {
    this.#brokenSince = null;
    this.#delayMs = FIRST_DELAY_MS;
  }

  /** Say what to do about a problem, and after how long. */
  after(problem, now, begun, sentBefore) {
    const action = actionAfter(problem, begun, sentBefore);
    if (action === START_OVER && this.startsOverLeft-- <= 0) return { action: GIVE_UP };
    this.#brokenSince ??= now;
    if (action === GIVE_UP || now - this.#brokenSince >= this.giveUpAfterMs) return { action: GIVE_UP };
    const delayMs = Math.max(this.#delayMs, problem.retryAfterMs);
    this.#delayMs = Math.min(2 * this.#delayMs, LAST_DELAY_MS);
    // Up to a fifth more, so that clients that broke together do not come back together.
    return { action, delayMs: delayMs * (1 + Math.random() / 5) };
  }
}
