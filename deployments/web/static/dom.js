// Elements, made with text only: nothing that comes from a server is ever read as HTML.

export const byId = (id) => document.getElementById(id);

/** Make an element; a string among the children becomes text. */
export function make(tag, { className, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set text only where it differs: a screen reader need not hear it again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
