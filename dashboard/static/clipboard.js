/** The clipboard, on pages without https as well. */

/** Whether `text` is on the clipboard now. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Denied, or the page has no focus: the older way below may still be allowed.
    }
  }
  const field = Object.assign(document.createElement("textarea"), { value: text, readOnly: true });
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
