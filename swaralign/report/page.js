"use strict";
// Search: a prompt stays if its text, transcripts and id together hold every word that was typed.
const form = document.getElementById("search");
const query = document.getElementById("query");
const found = document.getElementById("found");
const fold = (text) => text.normalize("NFC").toLowerCase();
const prompts = Array.from(document.getElementById("list").children, (item) => ({ item, text: fold(item.textContent) }));

function search() {
  const words = fold(query.value).split(/\s+/);
  for (const { item, text } of prompts) item.hidden = !words.every((word) => text.includes(word));
  found.textContent = `${prompts.filter(({ item }) => !item.hidden).length} of ${prompts.length} prompts`;
}

form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
query.addEventListener("input", search);
search();

// One take at a time.
document.addEventListener("play", (event) => {
  for (const audio of document.querySelectorAll("audio")) if (audio !== event.target) audio.pause();
}, true);
