"""Cleans captions as LlamaGen's training captions were: lower case, without markup, links, ids, advertising.

The rules follow the effect and the order of the published ones, which are applied twice to every caption.
Text in a broken encoding (mojibake) is not repaired.
"""

from __future__ import annotations

import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

FILES = "png|jpe?g|bmp|webp|eps|pdf|apk|mp4"
DOMAINS = "com|co|ru|net|org|edu|gov|it"
PATH = r"[\w/\-?=%.]"  # characters of a link behind its domain
# CJK strokes, phonetic extensions, enclosed and compatibility letters, ideographs, hexagrams
CJK = re.compile(r"[\u31c0-\u33ff\u3400-\u4dff\u4e00-\u9fff]+")
DASHES = re.compile(
    r"[-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32"
    r"\ufe58\ufe63\uff0d]+"
)
SNAKE = re.compile(r"[-_]")

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), text) for pattern, text in pairs)


LINKS = _rules(
    (rf"\bhttps?:(?:/{{1,3}})?{PATH}+", ""),
    (rf"\bwww\.{PATH}+", ""),
    (rf"\b[a-z0-9][a-z0-9.\-]*\.(?:{DOMAINS})\b(?:/{PATH}*)?", ""),
)
MARKS = _rules(
    (r"@\w+\b", ""),
    (CJK.pattern, ""),
    (DASHES.pattern, "-"),
    (r"[`\u00b4\u00ab\u00bb\u201c\u201d\u00a8]", '"'),
    (r"[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"(?<!\d)\d{1,3}(?:\.\d{1,3}){3}(?!\d)", " "),  # network addresses
    (r"\d:\d\d\s+$", ""),  # a time at the end of an article
    (r"\\n", " "),
    (r"#\d{1,3}\b|#\d{5,}\b|\b\d{6,}\b", ""),
    (rf"\S+\.(?:{FILES})\b", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#\u00ae\u2022\u00a9\u2122&@\u00b7\u00ba\u00bd\u00be\u00bf\u00a1\u00a7~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
ADVERTISING = _rules(
    (r"\b[a-z]{1,3}\d{3,15}\b", ""),  # jc6640
    (r"\b[a-z]+\d+[a-z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-z]+\d+\b", ""),  # 6640vc231
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{FILES})(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " "),  # j2d1a2a
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # 1920x1080
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
EDGES = _rules(
    (r"\A([\"'])(.+)[\"']\Z", r"\2"),
    (r"\A['_,\-:;]", ""),
    (r"['_,\-:+]\Z", ""),
    (r"\A\.\S+\Z", ""),
)


class _Text(HTMLParser):
    """Collects the text between tags."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def clean(caption: str) -> str:
    """Returns the caption in the form that the text encoder was trained on."""
    return _clean_once(_clean_once(caption))


def _clean_once(caption: str) -> str:
    text = unquote_plus(caption).strip().lower().replace("<person>", "person")
    text = _apply(LINKS, text)
    parser = _Text()
    parser.feed(text)
    parser.close()
    text = _apply(MARKS, "".join(parser.parts))
    if len(SNAKE.findall(text)) > 3:  # words joined as in a file name
        text = SNAKE.sub(" ", text)
    text = html.unescape(html.unescape(unicodedata.normalize("NFC", text)))
    return _apply(EDGES, _apply(ADVERTISING, text).strip()).strip()


def _apply(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text
