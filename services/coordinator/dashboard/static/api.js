// Requests to the coordinator. URLs are relative to the page, so that port-forwards and path prefixes work.

// sessionStorage: the token is deleted with this tab. localStorage would send it to the next cluster at this address,
// such as localhost:7070. The path distinguishes clusters behind one proxy.
const KEY = `gradpost.token:${new URL(".", location.href).pathname}`;
const TIMEOUT_MS = 10_000;

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }

  get wantsToken() {
    return this.status === 401 || this.status === 403;
  }
}

export const hasToken = () => sessionStorage.getItem(KEY) !== null;
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);

async function request(path, headers, signal) {
  const token = sessionStorage.getItem(KEY);
  const authorization = token === null ? {} : { authorization: `Bearer ${token}` };
  const reply = await fetch(path, { headers: { ...headers, ...authorization }, signal, cache: "no-store" });
  if (reply.ok) return reply;
  const problem = await reply.json().catch(() => ({}));
  throw new Problem(reply.status, problem.detail ?? `HTTP ${reply.status}`);
}

export async function ask(path) {
  const reply = await request(path, {}, AbortSignal.timeout(TIMEOUT_MS));
  return reply.json();
}

// Server-sent events, read with fetch because EventSource cannot send a header. Ends with the connection.
export async function* readEvents(path, lastId, signal) {
  const reply = await request(path, lastId ? { "last-event-id": String(lastId) } : {}, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
      if (data.length > 0) yield JSON.parse(data.join("\n"));
    }
  }
}
