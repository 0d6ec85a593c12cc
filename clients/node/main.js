#!/usr/bin/env node
// Maniple from the command line, in Node: streams a generation and does about errors what can be done about them.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import { credentials as Credentials, Metadata } from "@grpc/grpc-js";

import { Client, START_OVER } from "./client/index.js";
import { problemOf } from "./client/problem.js";
import { Printer } from "./printer.js";

const USAGE = `usage: maniple-node VERB [flags]

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
`;

const string = { type: "string" };
const FLAGS = {
  target: { type: "string", default: process.env.MANIPLE_SERVER || "127.0.0.1:50051" },
  prompt: { type: "string", default: "" },
  "token-ids": string,
  "request-id": string,
  "max-tokens": { type: "string", default: "64" },
  temperature: string,
  seed: string,
  "ignore-eos": { type: "boolean", default: false },
  deadline: string,
  "cancel-after": string,
  "retry-for": { type: "string", default: "30" },
  "start-over": { type: "string", default: "1" },
  "detach-grace": { type: "string", default: "0" },
  "tls-ca": string,
  "token-file": string,
  json: { type: "boolean", default: false },
  help: { type: "boolean", short: "h" },
};

class UsageError extends Error {}

function number(name, text) {
  const value = text === undefined ? undefined : Number(text);
  if (Number.isNaN(value) || text === "") throw new UsageError(`--${name}: ${JSON.stringify(text)} is no number`);
  return value;
}

function requestOf(flags) {
  const sampling = { max_tokens: number("max-tokens", flags["max-tokens"]), ignore_eos: flags["ignore-eos"] };
  if (flags.temperature !== undefined) sampling.temperature = number("temperature", flags.temperature);
  if (flags.seed !== undefined) sampling.seed = number("seed", flags.seed);
  const detach_grace_s = number("detach-grace", flags["detach-grace"]);
  const request = { request_id: flags["request-id"], sampling, detach_grace_s };
  if (flags["token-ids"] === undefined) return { ...request, text: flags.prompt };
  return { ...request, token_ids: { ids: flags["token-ids"].split(",").map((one) => number("token-ids", one)) } };
}

function credentialsOf(flags) {
  if (flags["tls-ca"] === undefined) {
    if (flags["token-file"] !== undefined) throw new UsageError("--token-file needs --tls-ca");
    return Credentials.createInsecure();
  }
  const tls = Credentials.createSsl(readFileSync(flags["tls-ca"]));
  if (flags["token-file"] === undefined) return tls;
  const bearer = Credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new Metadata();
    metadata.set("authorization", `Bearer ${readFileSync(flags["token-file"], "utf8").trim()}`); // it may be renewed
    done(null, metadata);
  });
  return Credentials.combineChannelCredentials(tls, bearer);
}

async function generate(client, flags, printer, deadline) {
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const cancelAfter = number("cancel-after", flags["cancel-after"]) ?? Infinity;
  const stream = client.generate(requestOf(flags), {
    deadline,
    signal: interrupt.signal,
    retryForMs: 1000 * number("retry-for", flags["retry-for"]),
    startsOver: number("start-over", flags["start-over"]),
  });
  let numTokens = 0;
  for await (const event of stream) {
    printer.event(event);
    if (event.kind === START_OVER) numTokens = 0;
    if (event.kind === "chunk" && (numTokens += event.token_ids.length) >= cancelAfter) {
      printer.answer({ event: "cancelled" });
      return; // leaving the loop cancels
    }
  }
}

async function run(words) {
  let printer = new Printer(false);
  let client;
  try {
    const { values: flags, positionals } = parseArgs({ args: words, options: FLAGS, allowPositionals: true });
    const [verb, ...rest] = positionals;
    if (flags.help || verb === undefined) {
      process.stderr.write(USAGE);
      return flags.help ? 0 : 2;
    }
    printer = new Printer(flags.json);
    const seconds = number("deadline", flags.deadline);
    const deadline = seconds ? new Date(Date.now() + 1000 * seconds) : undefined;
    client = new Client(flags.target.split(","), credentialsOf(flags));
    const ask = (service, method, request) => client.call(service, method, request, { deadline });
    if (verb === "generate" && rest.length === 0) {
      await generate(client, flags, printer, deadline);
    } else if (verb === "abort" && rest.length === 1) {
      const { was_running } = await ask("inference", "Abort", { request_id: rest[0] });
      printer.answer({ event: "aborted", was_running });
    } else if (verb === "tokenize" && rest.length === 1) {
      const { token_ids } = await ask("inference", "Tokenize", { text: rest[0] });
      printer.answer({ event: "tokens", token_ids });
    } else if (verb === "model" && rest.length === 0) {
      const { served_names: names, max_model_len, vocab_size } = await ask("inference", "GetModel", {});
      printer.answer({ event: "model", names, max_model_len, vocab_size });
    } else if (verb === "status" && rest.length === 0) {
      const { ready, not_ready_reason: why_not, groups } = await ask("admin", "GetStatus", {});
      const sum = (name) => groups.reduce((total, group) => total + group[name], 0);
      const counts = { num_running: sum("num_running"), num_waiting: sum("num_waiting") };
      printer.answer({ event: "status", ready, why_not, ...counts });
    } else {
      throw new UsageError(`no such verb, or not its arguments: ${positionals.join(" ")}`);
    }
    return 0;
  } catch (error) {
    if (error instanceof UsageError || error.code?.startsWith?.("ERR_PARSE_ARGS") || error.code === "ENOENT") {
      process.stderr.write(`maniple-node: ${error.message}; see maniple-node --help\n`);
      return 2;
    }
    printer.problem(problemOf(error));
    return 1;
  } finally {
    client?.close();
  }
}

process.exitCode = await run(process.argv.slice(2));
