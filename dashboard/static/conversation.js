/** A conversation's turns and the one answer that may be streaming. */

import { streamChat } from "./stream.js";
import { useRef, useState } from "./vendor/htm-preact.module.js";

const REDRAW_MS = 60;

/**
 * A turn is {id, question, answer, state, note, finish, stats, usage, error}, `state` one of
 * waiting | streaming | done | stopped | failed. `ask(question, options)` sends every turn that got
 * an answer before it; `options` are the request's other fields plus `system`.
 */
export function useConversation() {
  const [turns, setTurns] = useState([]);
  const running = useRef(null);
  const nextId = useRef(1);

  const patch = (id, change) =>
    setTurns((all) => all.map((turn) => (turn.id === id ? { ...turn, ...change } : turn)));

  async function ask(question, { system, ...fields }, before = turns) {
    const turn = { id: nextId.current++, question, answer: "", state: "waiting" };
    setTurns([...before, turn]);
    const messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap(spoken),
      { role: "user", content: question },
    ];
    const abort = new AbortController();
    running.current = abort;
    const end = await answer({ ...fields, messages }, abort.signal, (change) => patch(turn.id, change));
    patch(turn.id, end);
    if (running.current === abort) running.current = null;
  }

  const stop = () => running.current?.abort();
  const retry = (id, options) => {
    const index = turns.findIndex((turn) => turn.id === id);
    return ask(turns[index].question, options, turns.slice(0, index));
  };
  const clear = () => {
    stop();
    setTurns([]);
  };
  const busy = turns.some(({ state }) => state === "waiting" || state === "streaming");
  return { turns, busy, ask, stop, retry, clear };
}

/** A question without an answer would leave two user messages in a row, which templates refuse. */
const spoken = ({ question, answer }) =>
  answer
    ? [{ role: "user", content: question }, { role: "assistant", content: answer }]
    : [];

/** Streams one answer, redrawn at most every REDRAW_MS, and returns the turn's last change. */
async function answer(body, signal, draw) {
  let text = "";
  let timer = 0;
  const end = { state: "done", note: "" };
  const redraw = () => {
    timer = 0;
    draw({ answer: text, state: "streaming", note: "" });
  };
  try {
    for await (const event of streamChat(body, signal)) {
      if (event.kind === "text") {
        text += event.text;
        timer ||= setTimeout(redraw, REDRAW_MS);
      } else if (event.kind === "note") {
        draw({ note: event.text });
      } else if (event.kind === "finish") {
        end.finish = event.reason;
      } else {
        end.usage = event.usage;
        end.stats = event.stats;
      }
    }
  } catch (error) {
    end.state = signal.aborted ? "stopped" : "failed";
    end.error = signal.aborted ? null : error;
  } finally {
    clearTimeout(timer);
  }
  return { ...end, answer: text };
}
