/** Light, dark, or as the system has it: applied before the page is drawn, kept in this browser. */

const KEY = "exo-node.theme";
export const THEMES = ["system", "light", "dark"];

export function theme() {
  const kept = localStorage.getItem(KEY);
  return THEMES.includes(kept) ? kept : "system";
}

export function setTheme(name) {
  if (name === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, name);
  apply();
}

/** Colours follow `color-scheme`, which "light dark" leaves to the system. */
function apply() {
  const name = theme();
  document.documentElement.style.colorScheme = name === "system" ? "" : name;
}

addEventListener("storage", apply); // changed in another tab
apply();
