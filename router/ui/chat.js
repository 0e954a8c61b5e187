// The chat box: one conversation, streamed, each answer with its receipt.

import { post } from "./api.js";
import { byId, count, el } from "./dom.js";
import { receiptView } from "./receipt.js";

/** Wire up the chat. `needKey` is called when the router wants another key. */
export function startChat(needKey) {
  return new Chat(needKey);
}

class Chat {
  constructor(needKey) {
    this.needKey = needKey;
    this.model = "";
    this.messages = [];
    this.running = null;
    this.log = byId("log");
    this.hint = byId("chat-hint");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("new-chat").addEventListener("click", () => this.clear());
  }

  /** The model that is asked. */
  use(model) {
    this.model = model;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.hint);
    byId("message").focus();
  }

  async send() {
    const field = byId("message");
    const text = field.value.trim();
    if (!text || this.running || !this.model) return;
    field.value = "";
    this.hint.remove();
    this.log.append(el("article", { class: "turn person" }, el("h3", {}, "You"), el("p", {}, text)));
    const turn = new Answer(this.log);
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.setRunning(new AbortController());
    try {
      await this.stream(messages, turn);
      messages.push({ role: "assistant", content: turn.text });
    } catch (problem) {
      // A turn without its answer is no part of the conversation, and a new try must not hold it twice.
      messages.pop();
      if (problem.name === "AbortError") turn.note("Stopped.");
      else turn.fail(problem.message);
      if (problem.status === 401) this.needKey();
      if (messages === this.messages && !field.value && !turn.text) field.value = text;
    } finally {
      turn.end();
      this.setRunning(null);
    }
  }

  async stream(messages, turn) {
    const body = {
      model: this.model,
      messages,
      max_tokens: byId("max-tokens").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      kv_receipt: true,
    };
    for await (const event of post("v1/chat/completions", body, this.running.signal)) {
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content) turn.think(delta.reasoning_content);
      if (delta.content) turn.say(delta.content);
      if (event.usage) turn.usage = event.usage;
      if (event.kv_receipt) turn.receipt = event.kv_receipt;
    }
  }

  setRunning(control) {
    this.running = control;
    byId("send").hidden = control !== null;
    byId("stop").hidden = control === null;
    // Whoever pressed the button that goes away keeps a place to type from.
    if (document.activeElement === document.body) byId("message").focus();
  }
}

/** One answer as it comes. Read out when it is complete, not token by token. */
class Answer {
  constructor(log) {
    this.log = log;
    this.text = "";
    this.usage = null;
    this.receipt = null;
    this.startedAt = performance.now();
    this.thoughts = el("p", { class: "thoughts", hidden: true });
    this.body = el("p", { class: "text" });
    const head = el("h3", {}, "Answer");
    this.root = el("article", { class: "turn answer", "aria-busy": "true" }, head, this.thoughts, this.body);
    log.append(this.root);
    log.scrollTop = log.scrollHeight;
  }

  think(piece) {
    this.thoughts.hidden = false;
    this.add(() => this.thoughts.append(piece));
  }

  say(piece) {
    this.text += piece;
    this.add(() => this.body.append(piece));
  }

  note(words) {
    this.add(() => this.root.append(el("p", { class: "note" }, words)));
  }

  fail(words) {
    this.add(() => this.root.append(el("p", { class: "error", role: "alert" }, words)));
  }

  end() {
    if (this.usage) {
      const seconds = (performance.now() - this.startedAt) / 1000;
      this.note(`${count(this.usage.completion_tokens, "token")} in ${seconds.toFixed(1)} s`);
    }
    if (this.receipt) this.add(() => this.root.append(receiptView(this.receipt)));
    this.body.normalize();
    this.root.setAttribute("aria-busy", "false");
  }

  /** Change something and stay at the end of the log, unless the reader has scrolled away from it. */
  add(change) {
    const { log } = this;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    change();
    if (follows) log.scrollTop = log.scrollHeight;
  }
}
