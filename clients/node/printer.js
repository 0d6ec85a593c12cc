// Shows what happens: text to standard output and the rest to standard error, or everything as JSON lines.

export class Printer {
  constructor(json) {
    this.json = json;
  }

  event({ kind, ...event }) {
    if (kind === "started") {
      const { request_id, num_prompt_tokens, num_cached_tokens } = event;
      this.#line({ event: kind, request_id, num_prompt_tokens, num_cached_tokens });
    } else if (kind === "chunk") {
      const { index, token_ids, text } = event;
      this.#line({ event: kind, index, token_ids, text });
      if (!this.json) process.stdout.write(text);
    } else if (kind === "finished") {
      const { index, num_output_tokens } = event;
      const reason = event.reason.replace("FINISH_REASON_", "").toLowerCase();
      this.#line({ event: kind, index, reason, num_output_tokens });
    } else if (kind === "done") {
      const { num_output_tokens, duration_s } = event;
      this.#line({ event: kind, num_output_tokens, duration_s });
      if (!this.json) process.stdout.write("\n");
    } else {
      this.#recovering(kind, event);
    }
  }

  answer(facts) {
    this.#line(facts);
    if (this.json) return;
    for (const [name, value] of Object.entries(facts)) if (name !== "event") console.log(`${name}: ${value}`);
  }

  problem(problem) {
    this.#line({ event: "error", ...factsOf(problem) });
    if (!this.json) console.error(`\n${problem}`);
  }

  #recovering(kind, { problem, delayMs, target }) {
    const delay_s = delayMs / 1000;
    this.#line({ event: kind, delay_s, target, ...factsOf(problem) });
    if (!this.json) console.error(`\n[${problem}: ${kind.replace("_", " ")} in ${delay_s.toFixed(2)} s at ${target}]`);
  }

  #line(facts) {
    if (this.json) console.log(JSON.stringify(facts));
  }
}

function factsOf({ status, reason, message, violations, incidentId }) {
  return { status, reason, message, violations, incident_id: incidentId };
}
