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

export async function ask(path) {
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  const reply = await fetch(path, { headers, signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (reply.ok) return reply.json();
  const problem = await reply.json().catch(() => ({}));
  throw new Problem(reply.status, problem.detail ?? `HTTP ${reply.status}`);
}
