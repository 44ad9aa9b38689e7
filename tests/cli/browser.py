# SPDX-License-Identifier: Apache-2.0
"""What the checks of pages share: finding a Chromium, waiting, and what every page must do: name its controls, keep
text readable, fit the screen. Needs playwright (requirements-browser.txt)."""
import shutil
import subprocess
import time

# What a screen reader could not name.
UNNAMED = """
  Array.from(document.querySelectorAll('button, select, input, textarea, canvas, progress, svg[role]'))
    .filter(e => e.offsetParent !== null || e.tagName === 'svg')
    .filter(e => !e.getAttribute('aria-label') && !e.textContent.trim() && !(e.labels && e.labels.length) &&
                 !e.closest('[aria-hidden]'))
    .map(e => e.outerHTML.slice(0, 90))"""
# Text that stands out too little from what is behind it: WCAG 2.1 asks for 4.5, for large text for 3. Pictures and
# videos behind a text are not looked at; controls that are off are exempt.
FAINT = """(() => {
    const parse = text => {
      const n = text.match(/[0-9.]+/g).map(Number);
      return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1];
    };
    const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
    const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
      const x = c[i] / 255;
      return sum + w * (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    }, 0);
    const behind = e => {
      const stack = [];
      for (; e; e = e.parentElement) stack.push(parse(getComputedStyle(e).backgroundColor));
      return stack.reverse().reduce((below, c) => over(c, below), [255, 255, 255, 1]);
    };
    const faint = [], seen = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walk.nextNode());) {
      const e = node.parentElement;
      if (!node.textContent.trim() || seen.has(e) || !e.checkVisibility({visibilityProperty: true})) continue;
      seen.add(e);
      if (e.closest('script, noscript, :disabled, :has(> input:disabled), [aria-disabled=true]')) continue;
      const s = getComputedStyle(e), back = behind(e), text = over(parse(s.color), back);
      const a = light(text), b = light(back), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const large = parseFloat(s.fontSize) >= 24 || parseFloat(s.fontSize) >= 18.66 && Number(s.fontWeight) >= 700;
      if (ratio < (large ? 3 : 4.5)) faint.push(ratio.toFixed(2) + ': ' + node.textContent.trim().slice(0, 40));
    }
    return faint;
  })()"""
# How many colours a picture (a data URL) has, of those that differ clearly.
COLOURS = """async url => {
    const image = new Image();
    image.src = url;
    await image.decode();
    const o = new OffscreenCanvas(image.width, image.height), x = o.getContext('2d', {willReadFrequently: true});
    x.drawImage(image, 0, 0);
    const d = x.getImageData(0, 0, image.width, image.height).data, seen = new Set();
    for (let i = 0; i < d.length; i += 4) seen.add(d[i] >> 4 << 8 | d[i + 1] >> 4 << 4 | d[i + 2] >> 4);
    return seen.size;
  }"""


def find():
    """The browser's path, or None. Ubuntu's chromium-browser without its snap is a script that only says so."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    return None


def wait(page, condition, seconds=60):
    """Waits until an expression is true; its value. page.wait_for_function needs `eval`, which the pages forbid."""
    until = time.monotonic() + seconds
    while not (value := page.evaluate(condition)):
        if time.monotonic() > until:
            raise AssertionError("never became true: " + condition)
        time.sleep(0.02)
    return value


def wide(page):
    """By how many pixels the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - Math.min(innerWidth, screen.width)")
