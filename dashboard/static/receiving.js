/** One answer while it arrives: redrawn now and then, kept when its page goes. */

import { rest } from "./markdown.js";
import { streamChat } from "./stream.js";

const REDRAW_MS = 60;
const SAVE_MS = 1000;

/** Streams what follows `begun`, redrawn at most every REDRAW_MS and as the page can, and returns the message's last change. */
export async function received(body, begun, signal, draw, onLeave) {
  const { text, reasoning = "", thoughtMs, tokens = [] } = begun;
  const said = { text, reasoning, thoughtMs, calls: [], tokens: [...tokens] };
  const end = { state: "done", note: "", finish: undefined };
  let timer = 0;
  let saved = performance.now();
  const redraw = (save) => {
    timer = 0;
    if (save) saved = performance.now();
    draw({ ...taken(said), state: "streaming", note: "" }, save);
  };
  const page = watchPage(() => redraw(true), () => onLeave(taken({ ...said, tokens: [] })));
  try {
    for await (const event of streamChat(body, signal)) {
      if (event.kind === "note") draw({ note: event.text }, false);
      else if (event.kind === "finish") end.finish = event.reason;
      else if (event.kind === "stats") Object.assign(end, { usage: event.usage, stats: event.stats });
      else {
        take(said, event);
        timer ||= setTimeout(() => redraw(performance.now() - saved > SAVE_MS), rest(REDRAW_MS));
      }
    }
  } catch (error) {
    end.state = signal.aborted ? "stopped" : page.left ? "cut" : "failed";
    if (end.state === "failed") end.error = { message: error.message, code: error.code ?? "error", status: error.status };
  } finally {
    page.end();
    clearTimeout(timer);
  }
  return { ...taken(said), ...end };
}

/** Calls `onHide` when another tab is looked at and `onLeave` when the page goes: `left` from then on. */
function watchPage(onHide, onLeave) {
  const page = { left: false, end };
  const hide = () => document.hidden && onHide();
  const go = () => {
    page.left = true; // its requests break now, which is no fault of the node's
    onLeave();
  };
  function end() {
    removeEventListener("pagehide", go);
    document.removeEventListener("visibilitychange", hide);
  }
  addEventListener("pagehide", go);
  document.addEventListener("visibilitychange", hide);
  return page;
}

function take(said, event) {
  if (event.kind === "text") {
    if (said.reasoning) said.thoughtMs ??= Math.round(performance.now() - said.since);
    said.text += event.text;
  } else if (event.kind === "reasoning") {
    said.since ??= performance.now();
    said.reasoning += event.text;
  } else if (event.kind === "tokens") {
    said.tokens.push(...event.tokens);
  } else {
    const call = (said.calls[event.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= event.id;
    call.name += event.name;
    call.arguments += event.text;
  }
}

const taken = ({ text, reasoning, calls, tokens, thoughtMs }) => ({
  text,
  ...(reasoning && { reasoning, thoughtMs }),
  ...(calls.length > 0 && { calls: calls.map((call) => ({ ...call })) }),
  ...(tokens.length > 0 && { tokens: tokens.slice() }),
});
