/** Conversations in the browser's IndexedDB: the latest LIMIT, on this machine and nowhere else. */

import { parsed } from "./api.js";

const DATABASE = "exo-node";
const TABLE = "conversations";
export const LIMIT = 500;

/** Where the browser keeps nothing (private windows of some), what is said lasts for this page. */
export async function openStore() {
  try {
    const store = overDatabase(await opened());
    await store.all(); // a database that opens and cannot be read must not disable the chat
    return store;
  } catch {
    return inMemory();
  }
}

const LEFT = "exo-node.left.";

/** Keeps what an answer has said when its page goes, which IndexedDB does not do for a page that ends. */
export function leave(conversation, message, change) {
  localStorage.setItem(LEFT + message, JSON.stringify({ conversation, message, change }));
}

/** What pages left that went: [{conversation, message, change}]. It is not kept any longer. */
export function takeLeft() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(LEFT));
  const left = names.map((name) => parsed(localStorage.getItem(name)));
  for (const name of names) localStorage.removeItem(name);
  return left.filter(Boolean);
}

function opened() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(TABLE, { keyPath: "id" }).createIndex("updated", "updated");
  };
  return settled(request);
}

function overDatabase(database) {
  const table = (mode) => database.transaction(TABLE, mode).objectStore(TABLE);
  return {
    lasting: true,
    all: async () => (await settled(table("readonly").index("updated").getAll())).reverse(),
    get: (id) => settled(table("readonly").get(id)),
    remove: (id) => settled(table("readwrite").delete(id)),
    clear: () => settled(table("readwrite").clear()),
    async put(conversation) {
      await settled(table("readwrite").put(conversation));
      const ids = await settled(table("readonly").index("updated").getAllKeys());
      for (const id of ids.slice(0, Math.max(0, ids.length - LIMIT))) {
        await settled(table("readwrite").delete(id));
      }
    },
  };
}

function inMemory() {
  const kept = new Map();
  return {
    lasting: false,
    all: async () => [...kept.values()].sort((a, b) => b.updated - a.updated),
    get: async (id) => kept.get(id),
    remove: async (id) => void kept.delete(id),
    clear: async () => kept.clear(),
    put: async (conversation) => void kept.set(conversation.id, conversation),
  };
}

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds an older page open"));
  });
