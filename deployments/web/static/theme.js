// The theme: the system's, or the user's choice. Loaded before the first paint, so that the page does not flash.
(() => {
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const LABELS = { auto: "System", light: "Light", dark: "Dark" };
  const KEY = "pagoda-theme";

  function stored() {
    try {
      return localStorage.getItem(KEY) ?? "auto";
    } catch {
      return "auto"; // storage is disabled
    }
  }

  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  }

  function connect() {
    const button = document.getElementById("theme");
    const label = () => {
      const text = LABELS[document.documentElement.dataset.theme];
      button.querySelector("span").textContent = text;
      button.setAttribute("aria-label", `${text} theme`);
    };
    button.addEventListener("click", () => {
      const theme = NEXT[document.documentElement.dataset.theme];
      apply(theme);
      label();
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // storage is disabled: the choice holds for this page only
      }
    });
    label();
  }

  apply(stored() in NEXT ? stored() : "auto");
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", () => apply(document.documentElement.dataset.theme));
  document.addEventListener("DOMContentLoaded", connect);
})();
