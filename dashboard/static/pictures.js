/** Images of a message: taken from the clipboard, a drop or a file, made smaller, and shown. */

import { html, useRef, useState } from "./vendor/htm-preact.module.js";

/** Pixels of the longer side: about what models look at, and much less than a camera's. */
const LONGEST = 1568;
const PNG_CHARS = 4_000_000;
const KINDS = "image/png,image/jpeg,image/webp,image/gif";
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

/** The images of a message that is being written, at first `begun`; `pending` of them are not read yet. */
export function usePictures(begun) {
  const [urls, setUrls] = useState(begun);
  const [pending, setPending] = useState(0);
  const [fault, setFault] = useState("");
  const take = async (files) => {
    setFault("");
    setPending((count) => count + files.length);
    for (const file of files) {
      try {
        const url = await prepared(file);
        setUrls((held) => (held.length < MOST ? [...held, url] : held));
      } catch (error) {
        setFault(error.message);
      }
      setPending((count) => count - 1);
    }
  };
  const drop = (index) => setUrls((held) => held.filter((_, at) => at !== index));
  return { urls, pending, take, drop, fault, clear: () => (setUrls([]), setFault("")) };
}

/** A button that lets somebody choose images. */
export function Chooser({ disabled, onFiles }) {
  const field = useRef(null);
  const onChange = ({ target }) => {
    onFiles([...target.files]);
    target.value = ""; // the same file may be chosen again
  };
  return html`
    <button type="button" class="quiet" disabled=${disabled} onClick=${() => field.current.click()}>Image</button>
    <input ref=${field} type="file" accept=${KINDS} multiple hidden aria-label="Choose images" onChange=${onChange} />`;
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
