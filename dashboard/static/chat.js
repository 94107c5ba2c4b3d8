/** Chat, the page's home: the conversation that is shown, and what is said next. */

import { parsed } from "./api.js";
import { Composer } from "./composer.js";
import { draftName } from "./drafts.js";
import { bytes, plural, profileWords, rate } from "./format.js";
import { chosen, Mark } from "./frame.js";
import { atHand, copiesOf, isToy, modelOf, namesOf, roster, useCatalogue } from "./node.js";
import { branch } from "./tree.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.module.js";

/** Fetched with the first message: a page without one needs no Markdown. */
const PARTS = { Thread: () => import("./thread.js"), Options: () => import("./options.js") };

export function Chat({ data, talk, refresh }) {
  // Reading the conversations replaces the one that is shown, and what was typed with it.
  const models = talk.ready ? data.models?.data : undefined;
  const placements = data.placements?.data ?? [];
  const { current } = talk;
  const { options } = current;
  const model = chosen(models ?? [], options.model);
  const drafts = draftsOf(model, placements);
  const busy = talk.isRunning(current.id);
  const messages = branch(current);
  const [choosing, setChoosing] = useState(false);
  const Thread = usePart("Thread", messages.length > 0);
  const Options = usePart("Options", choosing);
  const request = () => requestFields(model, drafts, options);
  const { fault } = toolsOf(options.tools);

  // An answer may have loaded the model or met a locked node: ask what changed.
  useEffect(() => {
    if (!busy && messages.length > 0) refresh();
  }, [busy]);

  const loading = Boolean(messages.at(-1)?.note); // which the header says too
  useEffect(() => {
    if (loading) refresh();
  }, [loading]);

  return html`
    <div class=${`chat ${choosing ? "with-options" : ""}`}>
      <${Scroller} key=${current.id} following=${messages} length=${messages.length}>
        ${messages.length === 0
          ? html`<${Welcome} models=${models} model=${model} drafts=${drafts} placements=${placements}
              nodes=${data.cluster?.nodes ?? []} offline=${data.cluster?.offline} command=${data.cluster?.command} onAsk=${(text) => talk.ask(text, request())} />`
          : Thread && html`<${Thread} talk=${talk} messages=${messages} busy=${busy} request=${request}
              mayAsk=${Boolean(model) && !fault} known=${roster(data.cluster?.nodes ?? [])} />`}
      <//>
      <p class="unseen" role="status">${announcement(messages)}</p>
      <${Composer} key=${`composer-${current.id}`} name=${draftName(current)} busy=${busy} disabled=${!model || Boolean(fault)} choosing=${choosing}
        summary=${summary(options)} onStop=${() => talk.stop()} onOptions=${() => setChoosing(!choosing)}
        placeholder=${fault ? "The tools under Options have to be mended first" : model ? `Message ${model.id}` : "No model to talk to yet"}
        noImages=${noImages(model)} onType=${PARTS.Thread}
        onSend=${(text, images, files) => talk.ask(text, request(), undefined, images, files)} />
      ${choosing && Options && html`<${Options} options=${options} drafts=${drafts} model=${model}
        onChange=${(change) => talk.setOptions({ ...options, ...change })} onClose=${() => {
          setChoosing(false);
          document.querySelector(".options-toggle").focus();
        }} />`}
    </div>`;
}

/** A part once it is wanted and there, else null. */
function usePart(name, wanted) {
  const [part, setPart] = useState(null);
  useEffect(() => {
    if (wanted && !part) PARTS[name]().then((found) => setPart(() => found[name]));
  }, [wanted]);
  return wanted ? part : null;
}

/** {maxK} where the model drafts, {reason} where it does not. */
function draftsOf(model, placements) {
  const head = model?.native_mtp;
  if (!head) return { reason: "this model has no head for it" };
  const drafting = copiesOf(placements, modelOf(model))[0]?.drafting;
  if (drafting?.drafter_kind === "none") return { reason: drafting.reason };
  if (!head.enabled) return { reason: head.reason };
  return { maxK: head.max_k };
}

export const NUMBERS = { temperature: "temperature", topP: "top_p", topK: "top_k", minP: "min_p", maxTokens: "max_tokens", seed: "seed" };

/** The request's fields for `options`: what is empty is left to the model's card. */
export function requestFields(model, drafts, options) {
  const fields = { model: model.id, system: (options.system ?? "").trim() };
  for (const [name, field] of Object.entries(NUMBERS)) {
    if (options[name] !== undefined && options[name] !== "") fields[field] = Number(options[name]);
  }
  if (drafts.maxK && options.k) fields.num_draft_tokens = Math.min(Number(options.k), drafts.maxK);
  const { tools } = toolsOf(options.tools);
  if (tools) fields.tools = tools;
  if (options.effort) fields.reasoning_effort = options.effort;
  if (options.tokens) Object.assign(fields, { logprobs: true, return_token_ids: true });
  return fields;
}

/** {tools} of a text in JSON, none where there is no text, {fault} where it is something else. */
export function toolsOf(text) {
  if (!text?.trim()) return {};
  const found = parsed(text);
  const tools = Array.isArray(found) ? found : [found];
  const sound = tools.length > 0 && tools.every((tool) => tool?.type === "function" && tool.function?.name);
  return sound ? { tools } : { fault: 'This is no JSON list of {"type": "function", "function": {"name": …}}.' };
}

/** Why images are not taken; "" where they are, or where the node does not say. */
const noImages = (model) =>
  model?.capabilities && !model.capabilities.includes("vision") ? `${model.id} reads no images.` : "";

/** What differs from the model's own settings, in a few words. */
function summary({ system, temperature, preset, k, tools }) {
  if (preset) return preset;
  const parts = [
    system?.trim() && "system prompt",
    tools?.trim() && "tools",
    temperature !== undefined && temperature !== "" && `temperature ${temperature}`,
    k && (k === "0" ? "no drafts" : `K ${k}`),
  ];
  return parts.filter(Boolean).join(", ") || "Options";
}

function announcement(messages) {
  const words = { done: "Answer finished.", stopped: "Answer stopped." };
  return words[messages.at(-1)?.state] ?? "";
}

function Scroller({ following, length, children }) {
  const box = useRef(null);
  const follow = useRef(true);
  const onScroll = ({ target }) => {
    follow.current = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
  };
  useEffect(() => {
    follow.current = true;
  }, [length]);
  useLayoutEffect(() => {
    if (follow.current) box.current.scrollTop = box.current.scrollHeight;
  }, [following.at(-1), length, children]);
  return html`
    <div class="transcript" ref=${box} onScroll=${onScroll} tabindex="0" role="region"
      aria-label="Conversation">${children}</div>`;
}

/** Beginnings to try: for a toy what it was trained on, for others what they are good at. */
const TRIALS = {
  toy: ["Tell me a story.", "Who are you?", "Count from 5 to 15."],
  model: [
    "Explain recursion with a short example in Python.",
    "Write a short story about a lighthouse keeper.",
    "Plan a rainy weekend in Vienna.",
  ],
};

function Welcome({ models, model, drafts, placements, nodes, offline, command, onAsk }) {
  if (!models) return html`<div class="welcome"><${Mark} /><p class="muted pulse">Asking the node…</p></div>`;
  if (!model) {
    return html`
      <div class="welcome">
        <${Mark} />
        <h2>No model to talk to yet</h2>
        <p>${models.length > 0 ? "None of those on disk fits into the memory that is free." : "None is on a disk of this cluster."} ${" "}
          <a href="#/models">Models</a> shows what fits here and fetches it.</p>
      </div>`;
  }
  const known = roster(nodes);
  const ready = copiesOf(placements, modelOf(model)).filter(({ status }) => status === "ready");
  const names = namesOf(known, { stages: ready.flatMap(({ stages }) => stages) });
  return html`
    <div class="welcome">
      <${Mark} />
      <h2>${model.id}</h2>
      ${isToy(model) && html`<${Toy} model=${model} models=${models} offline=${offline} command=${command} />`}
      ${model.profile_of && html`<p>Your profile of ${model.profile_of}: ${profileWords(model.profile)}.</p>`}
      <p>${model.loaded
        ? `Loaded on ${names.join(", ") || "this cluster"}.`
        : `On disk (${bytes(model.size_bytes)}) and not in memory: your first message loads it.`}
        ${" "}${model.profile?.num_draft_tokens === 0
          ? "One token at a time, as the profile says."
          : drafts.maxK
          ? `It drafts up to ${drafts.maxK} tokens ahead and checks each: the same answer, sooner.`
          : `One token at a time: ${drafts.reason}.`}</p>
      <ul class="trials" aria-label="Prompts to try">
        ${TRIALS[isToy(model) ? "toy" : "model"].map((text) => html`
          <li key=${text}><button onClick=${() => onAsk(text)}>${text}</button></li>`)}
      </ul>
    </div>`;
}

/** Why a toy's answers are poor, and where nothing better is on a disk, what to get. */
function Toy({ model, models, offline, command }) {
  const alone = isToy(atHand(models) ?? model);
  const { models: catalogue } = useCatalogue(alone);
  const best = catalogue?.find((one) => one.recommended && !one.downloaded);
  return html`
    <p>A toy to try this page with: it tells simple stories, and knows nothing.</p>
    ${alone && best && html`
      <div class="better"><strong>${best.id}</strong> fits ${best.fits.nodes === 1 ? "this machine" : `over ${plural(best.fits.nodes, "node")}`}: ${" "}
        ${bytes(best.size_bytes)}, estimated ${rate(best.fits.tokens_per_second)} tok/s. ${" "}
        ${offline
          ? `This node is offline (${offline}), and downloads nothing.`
          : html`<a href="#/models">Get it under Models</a>, or run:
            <pre tabindex="0" aria-label="Command">${command ?? "exo-node"} models pull ${best.id}</pre>`}</div>`}
    ${alone && catalogue && !best && html`<p><a href="#/models">Models</a> shows what exo-node knows; none of it fits into the memory that is free.</p>`}`;
}
