"use strict";
// n answers to one prompt, streaming side by side. No outside resource, no build step; works on the server's own API.

const at = (id) => document.getElementById(id);
const root = new URL(".", location.href);
let model = null;
let running = null; // AbortController of the request under way

// ---- talking to the server

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function errorOf(response) {
  if (response.status === 401) {
    at("key-field").hidden = false;
    return "this server needs an API key";
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function connect() {
  try {
    const response = await fetch(new URL("v1/models", root), { headers: headers() });
    if (!response.ok) {
      at("model").textContent = await errorOf(response);
      return;
    }
    const found = (await response.json()).data[0];
    model = found.id;
    at("model").textContent = `${found.id}, ${found.max_model_len} tokens of context`;
    document.title = `${found.id}: n answers`;
  } catch {
    at("model").textContent = "the server cannot be reached";
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function request() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const common = {
    model: model ?? undefined, n: number("n"), temperature: number("temperature"), max_tokens: number("max-tokens"),
    seed: number("seed"), stream: true, stream_options: { include_usage: true },
  };
  const prompt = at("prompt").value;
  return at("mode").value === "chat"
    ? ["v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }], logprobs: true, top_logprobs: 5 }]
    : ["v1/completions", { ...common, prompt, logprobs: 5 }];
}

// ---- answers

class Answer {
  constructor(index) {
    this.tokens = 0;
    this.place = -1;
    this.element = document.createElement("article");
    this.element.className = "answer";
    this.element.tabIndex = 0;
    this.element.setAttribute("aria-label", `Answer ${index + 1}`);
    const head = document.createElement("header");
    const title = document.createElement("h2");
    title.textContent = `${index + 1}`;
    this.note = document.createElement("span");
    this.note.className = "quiet";
    head.append(title, this.note);
    this.text = document.createElement("div");
    this.text.className = "text";
    this.element.append(head, this.text);
    this.element.addEventListener("keydown", (event) => this.walk(event));
    this.element.addEventListener("focusout", () => this.leave());
  }

  add(text, entries) {
    this.tokens += entries.length;
    const joined = entries.map((entry) => entry.token).join("");
    if (joined === text && entries.length) {
      for (const entry of entries) this.append(entry.token, [entry]);
    } else if (text) {
      this.append(text, entries); // characters of several tokens, or a part of a character that is complete now
    }
    this.note.textContent = `${this.tokens} tokens`;
  }

  append(text, entries) {
    const span = document.createElement("span");
    span.textContent = text;
    span.className = "token";
    span.entries = entries;
    if (entries.length) span.classList.add(shade(Math.min(...entries.map((entry) => Math.exp(entry.logprob)))));
    this.text.append(span);
  }

  end(reason) {
    this.note.textContent = `${this.tokens} tokens, ${reason}`;
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const spans = this.text.children;
    if (step === undefined || !spans.length) return;
    event.preventDefault();
    spans[this.place]?.classList.remove("here");
    this.place = Math.max(0, Math.min(spans.length - 1, this.place + step));
    spans[this.place].classList.add("here");
    spans[this.place].scrollIntoView({ block: "nearest" });
    showTip(spans[this.place]);
  }

  leave() {
    this.text.children[this.place]?.classList.remove("here");
    hideTip();
  }
}

function shade(probability) {
  return probability > 0.9 ? "p4" : probability > 0.5 ? "p3" : probability > 0.2 ? "p2" : probability > 0.05 ? "p1" : "p0";
}

function entriesOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content;
  return logprobs.tokens.map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top_logprobs: Object.entries(logprobs.top_logprobs[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

// ---- alternatives of a token

const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣") || "∅";
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)} %`;

function showTip(span) {
  if (!span.entries?.length) return hideTip();
  const lines = [];
  for (const entry of span.entries) {
    lines.push(`${percent(entry.logprob)}  ${visible(entry.token)}  ◂`);
    for (const other of entry.top_logprobs ?? []) {
      if (other.token !== entry.token) lines.push(`${percent(other.logprob)}  ${visible(other.token)}`);
    }
  }
  const tip = at("tip");
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${box.bottom + 6 + scrollY}px`;
}

function hideTip() {
  at("tip").hidden = true;
}

// ---- the whole

function say(text, bad = false) {
  at("status").textContent = text;
  at("status").classList.toggle("bad", bad);
}

async function generate() {
  running?.abort();
  const mine = (running = new AbortController());
  const [path, body] = request();
  const answers = Array.from({ length: body.n }, (_, index) => new Answer(index));
  at("answers").replaceChildren(...answers.map((answer) => answer.element));
  at("legend").hidden = false;
  at("stop").disabled = false;
  say("waiting …");
  hideTip();
  const start = performance.now();
  let first = 0, usage = null, failed = "";
  const seconds = (to) => (to - start) / 1000;
  try {
    const response = await fetch(new URL(path, root), {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    let shown = 0;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        first ||= performance.now();
        const answer = answers[choice.index];
        answer.add(choice.text ?? choice.delta.content ?? "", entriesOf(choice));
        if (choice.finish_reason) answer.end(choice.finish_reason);
      }
      if (performance.now() - shown > 200) {
        shown = performance.now();
        const tokens = answers.reduce((sum, answer) => sum + answer.tokens, 0);
        say(`${tokens} tokens, ${(tokens / seconds(shown)).toFixed(0)} tokens/s`);
      }
    }
  } catch (error) {
    failed = error.name === "AbortError" ? "stopped" : error.message || "the connection was lost";
  }
  if (running !== mine) return; // another one has begun
  running = null;
  at("stop").disabled = true;
  const tokens = usage?.completion_tokens ?? answers.reduce((sum, answer) => sum + answer.tokens, 0);
  const time = seconds(performance.now());
  const figures = first
    ? `${answers.length} answers, ${tokens} tokens in ${time.toFixed(2)} s: ${(tokens / time).toFixed(0)} tokens/s; ` +
      `first token after ${(1000 * seconds(first)).toFixed(0)} ms` +
      (usage ? `; prompt of ${usage.prompt_tokens} tokens` : "")
    : "";
  say([failed, figures].filter(Boolean).join(" · "), Boolean(failed) && failed !== "stopped");
}

function stop() {
  running?.abort();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
at("stop").addEventListener("click", stop);
at("n").addEventListener("input", () => {
  at("n-shown").textContent = at("n").value;
});
at("key").addEventListener("change", connect);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  } else if (event.key === "Escape") {
    stop();
    hideTip();
  }
});
at("answers").addEventListener("pointerover", (event) => {
  if (event.target.classList?.contains("token")) showTip(event.target);
});
at("answers").addEventListener("pointerout", hideTip);
connect();
