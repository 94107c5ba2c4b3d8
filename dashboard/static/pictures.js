/** Images and text files of a message: taken from the clipboard, a drop or a file, and shown. */

import { textOf } from "./files.js";
import { bytes } from "./format.js";
import { html, useRef, useState } from "./vendor/htm-preact.module.js";

/** Pixels of the longer side: about what models look at, and much less than a camera's. */
const LONGEST = 1568;
const PNG_CHARS = 4_000_000;
export const MOST = 16;

/** A data URL of the image in `file`, scaled down and turned upright. Throws what names the file. */
export async function prepared(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name || "What was pasted"} is no image that this browser can show.`);
  });
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const url = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  return url && url.length <= PNG_CHARS ? url : canvas.toDataURL("image/jpeg", 0.9);
}

const isImage = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

/** What goes with a message that is being written, at first `begun`; `pending` of it is not read yet. */
export function useAttachments(begun, noImages) {
  const [urls, setUrls] = useState(begun.urls);
  const [files, setFiles] = useState(begun.files);
  const [pending, setPending] = useState(0);
  const [fault, setFault] = useState("");
  const add = (one, what) => (held) => {
    if (held.length < MOST) return [...held, one];
    setFault(`A message takes ${MOST} ${what}; the first ${MOST} go with it.`);
    return held;
  };
  async function takeOne(file) {
    if (!isImage(file)) return setFiles(add(await textOf(file), "text files"));
    if (noImages) throw new Error(noImages);
    return setUrls(add(await prepared(file), "images"));
  }
  const take = async (given) => {
    setFault("");
    setPending((count) => count + given.length);
    for (const file of given) {
      await takeOne(file).catch((error) => setFault(error.message));
      setPending((count) => count - 1);
    }
  };
  const without = (index) => (held) => held.filter((_, at) => at !== index);
  const drop = (index) => setUrls(without(index));
  const dropFile = (index) => setFiles(without(index));
  const clear = () => (setUrls([]), setFiles([]), setFault(""));
  return { urls, files, pending, take, drop, dropFile, fault, clear };
}

/** A button that lets somebody choose images and text files; `noImages`: why no images. */
export function Chooser({ disabled, noImages, onFiles }) {
  const field = useRef(null);
  const onChange = ({ target }) => {
    onFiles([...target.files]);
    target.value = ""; // the same file may be chosen again
  };
  return html`
    <button type="button" class="quiet" disabled=${disabled} title=${noImages && `${noImages} Text files go with a message.`}
      onClick=${() => field.current.click()}>Attach</button>
    <input ref=${field} type="file" multiple hidden aria-label="Choose images or text files" onChange=${onChange} />`;
}

/** The images of a message; with `onDrop` each has a button that takes it out. */
export const Pictures = ({ urls, onDrop }) =>
  urls?.length > 0 && html`
    <ul class="pictures" aria-label="Images">
      ${urls.map((url, index) => html`
        <li key=${index}>
          <img src=${url} alt=${`Image ${index + 1} of ${urls.length}`} />
          ${onDrop && html`<button type="button" class="quiet" aria-label=${`Remove image ${index + 1}`}
            onClick=${() => onDrop(index)}>×</button>`}
        </li>`)}
    </ul>`;

/** The text files of a message; with `onDrop` each has a button that takes it out. */
export const Files = ({ files, onDrop }) =>
  files?.length > 0 && html`
    <ul class="files" aria-label="Files">
      ${files.map(({ name, text }, index) => html`
        <li key=${index} class="line">
          <details>
            <summary dir="auto">${name} <span class="muted small">${bytes(new Blob([text]).size)}</span></summary>
            <pre tabindex="0" dir="auto">${text}</pre>
          </details>
          ${onDrop && html`<button type="button" class="quiet" aria-label=${`Remove ${name}`}
            onClick=${() => onDrop(index)}>×</button>`}
        </li>`)}
    </ul>`;
