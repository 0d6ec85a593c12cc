// Talk to a Maniple server, or to several that take over from each other.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { credentials as Credentials } from "@grpc/grpc-js";

import { endedEarly, Problem, problemInBand, problemOf, richer } from "./problem.js";
import { GIVE_UP, Recovery, RESUME, SEND_AGAIN, START_OVER } from "./recovery.js";
import { Servers } from "./servers.js";

export { Problem, RESUME, SEND_AGAIN, START_OVER };

/** What a stream has brought. It is resumed from here: ids and bytes of text per sample. */
class Transcript {
  started = null;
  #cursors = new Map();
  #finished = new Set();

  /** Keep what an event says; return whether it is news: a resumed stream says again what began and what ended. */
  take(kind, event) {
    if (kind === "started") {
      if (this.started) return false;
      this.started = event;
    } else if (kind === "finished") {
      if (this.#finished.has(event.index)) return false;
      this.#finished.add(event.index);
    }
    if (kind === "chunk" || kind === "finished") this.#count(event);
    return true;
  }

  resumeRequest() {
    const { request_id, resume_token } = this.started;
    return { request_id, resume_token, cursors: [...this.#cursors.values()] };
  }

  #count({ index, token_ids, text }) {
    const cursor = this.#cursors.get(index) ?? { index, num_tokens: 0, num_text_bytes: 0 };
    cursor.num_tokens += token_ids.length;
    cursor.num_text_bytes += Buffer.byteLength(text);
    this.#cursors.set(index, cursor);
  }
}

export class Client {
  #servers;

  /**
   * Connect in the background.
   *
   * @param {string[]} targets "host:port"; the first is preferred
   * @param {import("@grpc/grpc-js").ChannelCredentials} [credentials] plaintext if left out
   */
  constructor(targets, credentials = Credentials.createInsecure()) {
    this.#servers = new Servers(targets, credentials);
  }

  close() {
    this.#servers.close();
  }

  /**
   * Stream a generation, whatever happens to the servers under it. Leaving the loop early cancels: the server frees
   * what the request held within a step.
   *
   * Yields `{kind, ...event}` where the kind is started, chunk, finished or done, as in inference.proto, or what is
   * being done about a stream that broke: sending_again, resuming or starting_over (what came before is void), each
   * with `problem`, `delayMs` and `target`. Throws a `Problem` when it ends badly.
   *
   * @param {object} request a GenerateRequest
   * @param {object} [options]
   * @param {Date} [options.deadline] the server ends the request then
   * @param {AbortSignal} [options.signal] cancels
   * @param {number} [options.retryForMs] how long it may bring nothing after it broke
   * @param {number} [options.startsOver] how often it may begin anew
   */
  async *generate(request, { deadline, signal, retryForMs = 30_000, startsOver = 1 } = {}) {
    // An id of ours, so that sending it again cannot run it twice.
    let asked = { ...request, request_id: request.request_id || randomUUID() };
    const recovery = new Recovery({ giveUpAfterMs: retryForMs, startsOver });
    let transcript = new Transcript();
    let sentBefore = false;
    let ended = false; // and the server knows it
    try {
      for (;;) {
        let problem;
        try {
          for await (const [kind, event] of this.#read(asked, transcript, { deadline, signal })) {
            recovery.heard();
            ended = kind === "done";
            yield { kind, ...event };
            if (ended) return;
          }
          problem = endedEarly();
        } catch (error) {
          problem = problemOf(error);
        }
        const begun = transcript.started !== null;
        const { action, delayMs } = recovery.after(problem, performance.now(), begun, sentBefore);
        if (action === GIVE_UP || signal?.aborted) {
          ended = problem.reason !== "";
          throw problem;
        }
        if (action === START_OVER) {
          asked = { ...asked, request_id: randomUUID() }; // the old id is taken for a minute
          transcript = new Transcript();
        } else {
          this.#servers.move(problem.ownerAddress);
        }
        sentBefore = action === SEND_AGAIN;
        yield { kind: action, problem, delayMs, target: this.#servers.now.target };
        await pause(delayMs, deadline, signal);
      }
    } finally {
      if (!ended && transcript.started && asked.detach_grace_s > 0) await this.#abort(asked.request_id);
    }
  }

  /** Ask once: `call("inference", "Tokenize", {text})`. Throws a `Problem`. */
  call(service, method, request, { deadline } = {}) {
    const stub = this.#servers.now[service];
    return new Promise((resolve, reject) => {
      stub[method](request, { deadline }, (error, answer) => (error ? reject(problemOf(error)) : resolve(answer)));
    });
  }

  /** The server was asked to go on when a connection ends, so it must be told. If it cannot be, it is not needed. */
  async #abort(request_id) {
    await this.call("inference", "Abort", { request_id }, { deadline: new Date(Date.now() + 5000) }).catch(() => {});
  }

  /** Read one call, Generate or, once the request has begun, Resume. */
  async *#read(request, transcript, { deadline, signal }) {
    const stub = this.#servers.now.inference;
    const call = transcript.started
      ? stub.Resume(transcript.resumeRequest(), { deadline })
      : stub.Generate(request, { deadline });
    const cancel = () => call.cancel();
    call.on("error", () => {}); // thrown by the loop below; after it, of no interest
    signal?.addEventListener("abort", cancel, { once: true });
    let inBand = null;
    try {
      for await (const message of call) {
        const response = message.response ?? message;
        const kind = response.event;
        if (kind === "error") inBand = problemInBand(response.error);
        else if (kind && transcript.take(kind, response[kind])) yield [kind, response[kind]];
      }
      if (inBand) throw inBand;
    } catch (error) {
      throw richer(inBand, problemOf(error));
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.cancel();
    }
  }
}

/** Wait before the next attempt, but not beyond the deadline. */
async function pause(delayMs, deadline, signal) {
  const leftMs = deadline ? deadline.getTime() - Date.now() : Infinity;
  try {
    await sleep(Math.max(0, Math.min(delayMs, leftMs)), undefined, { signal });
  } catch {
    throw new Problem({ status: "CANCELLED", message: "cancelled while waiting to try again" });
  }
  if (delayMs >= leftMs) throw new Problem({ status: "DEADLINE_EXCEEDED", message: "the deadline passed" });
}
