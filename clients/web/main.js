// The page: what was said, a prompt, and one button that sends or stops.

import { answer, model, wordsOf } from "./service.js";

const MAX_TOKENS = 1024;
const [said, ask, prompt, go, facts] = ["said", "ask", "prompt", "go", "facts"].map((id) => document.getElementById(id));
const messages = [];
let running = null; // an AbortController while the model speaks
let served = null;

function show(kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  said.append(line);
  line.scrollIntoView({ block: "end" });
  return line;
}

function turn(controller) {
  running = controller;
  go.textContent = controller ? "Stop" : "Send";
}

async function send(text) {
  const began = performance.now();
  messages.push({ role: "user", content: text });
  show("user", text);
  const line = show("assistant", "");
  turn(new AbortController());
  try {
    served ??= await describe();
    const options = { hasTemplate: served.hasChatTemplate, maxTokens: MAX_TOKENS, signal: running.signal };
    for await (const { text, done } of answer(messages, options)) {
      if (text) {
        line.textContent += text;
        said.scrollTop = said.scrollHeight;
      }
      if (done) {
        const seconds = (performance.now() - began) / 1000;
        const first = `first after ${done.timeToFirstTokenS.toFixed(2)} s`;
        facts.textContent = `${done.numOutputTokens} tokens in ${seconds.toFixed(1)} s, ${first}`;
      }
    }
  } catch (error) {
    const words = wordsOf(error);
    if (words) show("error", words);
    else facts.textContent = "stopped";
  }
  if (line.textContent) messages.push({ role: "assistant", content: line.textContent });
  else (messages.pop(), line.remove());
  turn(null);
}

async function describe() {
  const found = await model();
  document.getElementById("model").textContent = `${found.servedNames[0]}, ${found.maxModelLen} tokens`;
  return found;
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (running) running.abort();
  else if (text) {
    prompt.value = "";
    send(text);
  }
});

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) {
    event.preventDefault();
    ask.requestSubmit();
  }
});

describe().then(
  (found) => (served = found),
  (error) => show("error", wordsOf(error)),
);
