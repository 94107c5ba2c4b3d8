/** The node's HTTP API: the key, JSON calls and their errors. */

import { sentence } from "./format.js";

const KEY = "exo-node.api-key";
const SESSION = "exo-node.session";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const rememberKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** The rights of the node's own user, of a link that `exo-node dashboard` printed: once. */
export async function beginSession() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("login");
  if (!ticket) return "";
  history.replaceState(null, "", location.pathname);
  try {
    const { session } = await call("POST", "/v1/session", { body: { ticket } });
    localStorage.setItem(SESSION, session);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** A refusal by the node (`status` is HTTP's), or no answer at all (`status` 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "unreachable" } = {}) {
    super(sentence(message));
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** The error that a body of the form `{"error": {"message", "code"}}` carries. */
export function apiError(body, status) {
  const { message, code } = body?.error ?? {};
  return new ApiError(message || `The node answered ${status}.`, { status, code: code ?? "error" });
}

/** The response, once its status is 2xx. Throws ApiError, or AbortError when `signal` fired. */
export async function send(method, path, { body, signal } = {}) {
  const headers = { Accept: "application/json, text/event-stream" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const session = localStorage.getItem(SESSION);
  if (session) headers["X-Exo-Token"] = session;
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ApiError("The node did not answer in time.");
    throw new ApiError("The node cannot be reached. Check that exo-node is running.");
  }
  if (response.ok) return response;
  const text = await response.text();
  throw apiError(parsed(text), response.status);
}

/** The JSON that the node answers, null for an empty body. */
export async function call(method, path, options) {
  const response = await send(method, path, options);
  const text = await response.text();
  if (!text) return null;
  const value = parsed(text);
  if (value === undefined) throw new ApiError(`${path} did not answer with JSON.`, { code: "bad_body" });
  return value;
}

/** The value of `text`, undefined where it is not JSON. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
