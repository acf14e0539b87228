// Updates of the page: only changes are written, so that selections, focus and scroll positions stay.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Show `text`; `value` is the exact value of the API.
export function show(element, text, value) {
  if (element.textContent !== text) element.textContent = text;
  const exact = value === undefined ? null : JSON.stringify(value);
  if (exact !== null && element.dataset.value !== exact) element.dataset.value = exact;
}

export function flag(element, name, on) {
  if (element.hasAttribute(name) !== Boolean(on)) element.toggleAttribute(name, Boolean(on));
}

// One child for each item and its key: created by `create`, then updated by `update`.
export function keep(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, i) => {
    const name = String(key(item));
    let child = old.get(name);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = name;
    }
    old.delete(name);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}

// Rows of a table: each column is [class, (cell, item) => …].
export function keepRows(section, items, key, columns) {
  const body = section.querySelector("tbody");
  const create = () => make("tr", {}, ...columns.map(([name]) => make("td", { class: name || undefined })));
  keep(body, items, key, create, (row, item) => columns.forEach(([, fill], i) => fill(row.cells[i], item)));
  flag(section, "data-empty", items.length === 0);
}
