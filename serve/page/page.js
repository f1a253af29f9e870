"use strict";
// The page is a client like any other: it asks for a stream and paints every event. Text reaches the page as
// textContent alone, so that no prompt, name or message is ever read as HTML.

const at = (id) => document.getElementById(id);
let running = null;
let rows = 1; // of codes in an image

function say(text, isError = false) {
  at("caption").textContent = text;
  at("caption").classList.toggle("error", isError);
}

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function message(response) {
  if (response.status === 401) at("key-field").hidden = false;
  const content = await response.json().catch(() => ({}));
  return content.error?.message ?? `status ${response.status}`;
}

async function loadMethods() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return say(await message(response), response.status !== 401);
  const model = (await response.json()).data[0];
  const options = model.methods.map((name) => new Option(name, name, false, name === model.default_method));
  at("method").replaceChildren(...options);
  rows = model.rows;
  document.title = `ADT-Tree: ${model.id}`;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

async function paint(event) {
  const bytes = Uint8Array.from(atob(event.b64_json), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: `image/${event.output_format}` }));
  const canvas = at("picture");
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) {
    [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
    canvas.style.aspectRatio = `${bitmap.width} / ${bitmap.height}`;
  }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

async function generate(mine) {
  const started = performance.now();
  const seconds = () => `${((performance.now() - started) / 1000).toFixed(1)} s`;
  const body = { prompt: at("prompt").value, stream: true, partial_rows: 1, temperature: at("temperature").valueAsNumber };
  if (at("method").value) body.method = at("method").value;
  if (at("seed").value !== "") body.seed = at("seed").valueAsNumber;
  at("progress").removeAttribute("value");
  say("Waiting for a slot.");
  const request = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: mine.signal };
  const response = await fetch("/v1/images/generations", request);
  if (!response.ok) throw new Error(await message(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    await paint(event);
    mine.signal.throwIfAborted();
    const whole = event.type === "image_generation.completed";
    const row = whole ? rows : event.partial_image_index + 1;
    at("progress").value = row / rows;
    const progress = [seconds(), ...(whole ? [] : [`row ${row} of ${rows}`]), ...(event.warnings ?? [])];
    say(`Seed ${event.seed}: ${progress.join(", ")}`);
  }
}

async function start(submit) {
  submit.preventDefault();
  running?.abort();
  const mine = (running = new AbortController());
  at("cancel").disabled = false;
  try {
    if (!at("method").options.length) await loadMethods();
    await generate(mine);
  } catch (error) {
    const cancelled = error.name === "AbortError";
    // The caption of a run that a later one has replaced is that of the later one.
    if (running === mine) say(cancelled ? "Cancelled." : error.message, !cancelled);
  }
  if (running === mine) {
    at("cancel").disabled = true;
    if (!at("progress").hasAttribute("value")) at("progress").value = 0;
  }
}

at("form").addEventListener("submit", start);
at("cancel").addEventListener("click", () => running?.abort());
loadMethods().catch((error) => say(error.message, true));
