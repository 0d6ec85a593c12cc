// One or several servers of the same model, any of which may take over from another.

import { AdminService, InferenceService } from "./protos.js";

const CHANNEL_OPTIONS = {
  // Retries are decided by us, who know what has begun. gRPC's own would not know.
  "grpc.enable_retries": 0,
  // Finds a dead peer while a generation is silent. Proxies do not count pings as traffic.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  // The default waits up to two minutes before it connects again; a server that restarts is back in seconds.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1000,
  // Answers with log-probabilities may be longer than the default of 4 MiB.
  "grpc.max_receive_message_length": 64 * 2 ** 20,
};

export class Servers {
  #all = [];
  #present = 0;

  constructor(targets, credentials) {
    this.credentials = credentials;
    for (const target of targets) this.#add(target);
  }

  /** The server that is asked now: its target and its calls. */
  get now() {
    return this.#all[this.#present];
  }

  /** Turn to the server that was named as the owner of a request, or else to the next in turn. */
  move(owner) {
    if (!owner) {
      this.#present = (this.#present + 1) % this.#all.length;
      return;
    }
    const known = this.#all.findIndex(({ target }) => target === owner);
    this.#present = known >= 0 ? known : this.#add(owner);
  }

  close() {
    for (const { inference, admin } of this.#all) {
      inference.close();
      admin.close();
    }
  }

  #add(target) {
    const made = (Service) => new Service(target, this.credentials, CHANNEL_OPTIONS);
    return this.#all.push({ target, inference: made(InferenceService), admin: made(AdminService) }) - 1;
  }
}
