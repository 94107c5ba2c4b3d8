/** Text files of a message: read within limits, and put before what was written. */

import { bytes } from "./format.js";

const MOST_BYTES = 256_000;

/** {name, text} of a file in UTF-8. Throws what names the file. */
export async function textOf(file) {
  const name = file.name.replace(/\s+/g, " ").slice(0, 120) || "What was pasted";
  if (file.size > MOST_BYTES) throw new Error(`${name} has ${bytes(file.size)}; a file may have ${bytes(MOST_BYTES)}.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name, text };
  } catch {
    // Not UTF-8, or gone from the disk.
  }
  throw new Error(`${name} is neither an image nor text in UTF-8.`);
}

/** A question as a model reads it: each file with its name, in a fence that nothing in it closes. */
export const withFiles = (text, files = []) => [...files.map(fenced), text].filter((part) => part.trim()).join("\n\n");

function fenced({ name, text }) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, { length }) => Math.max(most, length), 2);
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
