// How the page talks to its router: the key, whole answers, and streams of events.

// The page may be served below a path of its own; this file is always one level below where the API is.
const ROOT = new URL("..", import.meta.url);
const KEY = "kvferry.key";

/** An answer that is no success: `status` (0: none came) and the router's own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The events of a GET stream, as parsed JSON. Raises ApiError. */
export async function* watch(path, signal) {
  yield* events(await request(path, { signal }));
}

/** The events of a POST that streams, as parsed JSON. Raises ApiError; an error inside the stream too. */
export async function* post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const event of events(answer)) {
    if (event.error) throw new ApiError(200, event.error.message);
    yield event;
  }
}

async function request(path, options) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
  } catch (problem) {
    if (options.signal?.aborted) throw problem;
    throw new ApiError(0, "The router cannot be reached.");
  }
  if (answer.ok) return answer;
  const error = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, error.error?.message ?? `The router answered ${answer.status}.`);
}

/** Server-sent events of an answer: the JSON behind each `data:`. Returns at [DONE]; raises if that does not come. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The connection broke before the end.");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block === "data: [DONE]") return;
        if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
