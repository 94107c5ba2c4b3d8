/** Before a model's files are deleted: what that frees on which node, or why it may not be. */

import { call } from "./api.js";
import { bytes } from "./format.js";
import { on } from "./pulls.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

export function RemoveDialog({ model, several, onClose }) {
  const box = useRef(null);
  const nodes = model.nodes?.length > 0 ? model.nodes : [""];
  const [node, setNode] = useState(nodes[0]);
  const [answer, setAnswer] = useState(null);
  const [failure, setFailure] = useState("");
  const [busy, setBusy] = useState(false);
  const path = `/v1/models/${model.id.split("/").map(encodeURIComponent).join("/")}${on(node)}`;
  const would = answer?.of === node ? answer : null; // not the one before
  useEffect(() => box.current.showModal(), []);
  useEffect(() => {
    let current = true;
    setFailure("");
    call("DELETE", `${path}${node ? "&" : "?"}dry_run=1`).then(
      (found) => current && setAnswer({ ...found, of: node }),
      (error) => current && setFailure(error.message),
    );
    return () => {
      current = false;
    };
  }, [node]);

  async function remove(event) {
    event.preventDefault();
    setBusy(true);
    setFailure("");
    try {
      onClose(await call("DELETE", path));
    } catch (error) {
      setFailure(error.message);
      setBusy(false);
    }
  }
  const place = several && node ? `${node}'s disk` : "the disk";
  return html`
    <dialog ref=${box} aria-labelledby="remove-title" onClose=${() => onClose()}>
      <form onSubmit=${remove}>
        <h2 id="remove-title">Delete ${model.id}</h2>
        ${nodes.length > 1 && html`
          <label>From the disk of
            <select value=${node} onChange=${({ target }) => setNode(target.value)}>
              ${nodes.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
            </select>
          </label>`}
        <div aria-live="polite">
          ${!would && !failure && html`<p class="muted pulse">Looking what that frees…</p>`}
          ${would && html`<p>This deletes the model's files from ${place} and frees <strong>${bytes(would.freed_bytes)}</strong>.
            ${" "}${nodes.length > 1 ? "Other nodes keep theirs." : "To use it again, download it again."}</p>`}
        </div>
        ${failure && html`<p class="notice bad" role="alert">${failure}</p>`}
        <div class="line foot">
          <button type="button" onClick=${() => onClose()}>Keep</button>
          <button class="danger" disabled=${!would || busy}>${busy ? "Deleting…" : would ? `Delete, free ${bytes(would.freed_bytes)}` : "Delete"}</button>
        </div>
      </form>
    </dialog>`;
}
