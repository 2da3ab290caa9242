// Views by address, filters, theme. The page is whole without it: all views stand one after the other.
"use strict";
const root = document.documentElement;
const views = [...document.querySelectorAll("[data-view]")];
root.classList.add("js");

function remember(key, value) {
  try { sessionStorage.setItem(key, value); } catch { /* a browser may forbid it: then it is not remembered */ }
}

function remembered(key) {
  try { return sessionStorage.getItem(key); } catch { return null; }
}

function show(moved) {
  let id = location.hash.slice(1);
  try { id = decodeURIComponent(id); } catch { /* not an encoded name: taken as it is */ }
  const target = id ? document.getElementById(id) : null;
  const view = target?.closest("[data-view]") ?? views[0];
  for (const each of views) each.hidden = each !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!moved) return;
  if (target && target !== view) target.scrollIntoView();
  else {
    window.scrollTo(0, 0);
    view.querySelector("h1").focus({ preventScroll: true });
  }
}
window.addEventListener("hashchange", () => show(true));
show(location.hash.length > 1);

function apply(form) {
  const view = form.closest("[data-view]");
  const off = name => new Set([...form.querySelectorAll(`input[name="${name}"]:not(:checked)`)].map(box => box.value));
  const steps = off("n-iters"), seeds = off("seed");
  for (const item of view.querySelectorAll("[data-n-iters], [data-seed]")) {
    item.toggleAttribute("hidden", steps.has(item.dataset.nIters) || seeds.has(item.dataset.seed));
  }
  const runs = [...view.querySelectorAll("details.run")];
  const left = runs.filter(run => !run.hidden).length;
  form.querySelector("output").textContent = `${left} of ${runs.length} runs shown`;
  remember(`filters ${view.id}`, JSON.stringify([[...steps], [...seeds]]));
}
for (const form of document.querySelectorAll("form.filters")) {
  const [steps, seeds] = JSON.parse(remembered(`filters ${form.closest("[data-view]").id}`) ?? "[[],[]]");
  for (const box of form.querySelectorAll("input")) {
    box.checked = !(box.name === "seed" ? seeds : steps).includes(box.value);
  }
  form.addEventListener("change", () => apply(form));
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => apply(form)));
  apply(form);
}

const themes = ["auto", "light", "dark"];
const button = document.getElementById("theme");
function paint(theme) {
  root.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  remember("theme", theme);
}
button.addEventListener("click", () => paint(themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length]));
paint(themes.includes(remembered("theme")) ? remembered("theme") : "auto");

let closed = [];
window.addEventListener("beforeprint", () => {
  closed.push(...document.querySelectorAll("[data-view]:not([hidden]) details:not([open])"));
  for (const each of closed) each.open = true;
});
window.addEventListener("afterprint", () => {
  for (const each of closed) each.open = false;
  closed = [];
});
