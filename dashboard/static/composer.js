/** The field for a message, with its images, its files and its draft. */

import { draftOf, forgetDrafts, keepDraft } from "./drafts.js";
import { showKeys } from "./keys.js";
import { Chooser, Files, Pictures, useAttachments } from "./pictures.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.module.js";

export function Composer({ name, noImages, onType, busy, disabled, choosing, summary: words, placeholder, onSend, onStop, onOptions }) {
  const [text, setText] = useState(draftOf(name).text);
  const attached = useAttachments(draftOf(name), noImages);
  const field = useRef(null);
  const { urls, files } = attached;
  useLayoutEffect(() => keepDraft(name, { text, urls, files }), [text, urls, files]);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) field.current.focus({ preventScroll: true });
  }, [disabled]);

  const hasContent = attached.pending === 0 && (text.trim() || urls.length > 0 || files.length > 0);
  function submit(event) {
    event.preventDefault();
    if (busy || disabled || !hasContent) return;
    forgetDrafts([name]);
    onSend(text, urls, files);
    setText("");
    attached.clear();
    field.current.focus();
  }
  function onInput(event) {
    onType(); // fetched while the message is being typed
    setText(event.target.value);
  }
  function onKeyDown(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && busy) onStop();
  }
  /** Files of a paste or a drop; text goes where it always does. */
  function onTransfer(event, { files: given }) {
    if (given.length === 0) return;
    event.preventDefault();
    if (!disabled) attached.take([...given]);
  }
  return html`
    <form class="composer" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => onTransfer(event, event.dataTransfer)} onPaste=${(event) => onTransfer(event, event.clipboardData)}>
      <${Pictures} urls=${urls} onDrop=${attached.drop} />
      <${Files} files=${files} onDrop=${attached.dropFile} />
      ${attached.fault && html`<p class="warn-text small" role="alert">${attached.fault}</p>`}
      <textarea ref=${field} rows="1" dir="auto" aria-label="Message" disabled=${disabled} value=${text}
        placeholder=${placeholder} onInput=${onInput} onKeyDown=${onKeyDown}></textarea>
      <div class="line">
        <button type="button" class="quiet options-toggle" aria-expanded=${choosing} onClick=${onOptions}>${words}</button>
        <${Chooser} disabled=${disabled} noImages=${noImages} onFiles=${attached.take} />
        <button type="button" class="quiet hint end" onClick=${showKeys}>Enter sends · Keys</button>
        ${busy
          ? html`<button type="button" key="stop" class="stop" onClick=${onStop}>Stop</button>`
          : html`<button class="primary" key="send" disabled=${disabled || !hasContent}>Send</button>`}
      </div>
    </form>`;
}
