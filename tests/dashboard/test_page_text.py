"""An answer's text on the page: formulas, directions of writing, tables, lists, notes, images."""

from typing import Any

import pytest
from browser import DARK, DESK, PHONE, Visit, answers, send, visit, wait_for_answer
from fakes import FINISHED, says
from http_node import Node
from playwright.sync_api import Browser, expect

from exo_node.node.chat.requests import ReasoningDelta, Started, TextDelta

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]

RENDERED = """async (text) => {
  const { renderBlocks } = await import("/static/markdown.js");
  const all = document.createElement("div");
  all.innerHTML = renderBlocks(text, new Map()).map(({ __html }) => __html).join("");
  const sources = [...all.querySelectorAll("code.tex")].map((code) => code.textContent);
  return { sources, text: all.textContent, html: all.innerHTML };
}"""


def rendered(view: Visit, text: str) -> dict[str, Any]:
    """How `text` is shown before any formula is drawn: the sources, the text, the HTML."""
    return view.page.evaluate(RENDERED, text)


def test_long_lists_of_sources_are_kept_once(view: Visit) -> None:
    """They were part of the key of every block: an answer with 3,000 of them held the page."""
    view.go()
    sources = "\n".join(f"[a{n}]: http://127.0.0.1/{n}" for n in range(200))
    blocks = "\n\n".join(f"see [a{n}]" for n in range(200))
    kept, before, after = view.page.evaluate(
        """async ([sources, blocks]) => {
          const { renderBlocks } = await import("/static/markdown.js");
          const rendered = new Map();
          const html = (text) => renderBlocks(text, rendered).map((one) => one.__html).join("");
          const before = html(blocks);
          const after = html(`${blocks}\n\n${sources}`);
          return [[...rendered.keys()].join("").length, before, after];
        }""",
        [sources, blocks],
    )
    assert kept <= len(blocks)
    assert "href" not in before and after.count("href") == 200


FORMULAS: list[tuple[str, list[str]]] = [
    (r"So $E = mc^2$ holds.", ["$E = mc^2$"]),
    (r"So \(a^2+b^2\) holds.", [r"\(a^2+b^2\)"]),
    (r"$$\int_0^1 x^2 \, dx$$", [r"$$\int_0^1 x^2 \, dx$$"]),
    (r"the $n$th of **$a*b$ and $c*d$**", ["$n$", "$a*b$", "$c*d$"]),
    ("We have: \\[\n- a\n= b \\\\\n\n\\] next", ["\\[\n- a\n= b \\\\\n\n\\]"]),
    ("We have: \\[\n- a\n= b \\\\\n# c\n\\] and $d$", ["\\[\n- a\n= b \\\\\n# c\n\\]", "$d$"]),
    ("$$\n\n> a \\, b\n\n$$", ["$$\n\n> a \\, b\n\n$$"]),
    ("- one\n  $$\n  1. a\n  $$\n- two", ["$$\n1. a\n$$"]),
    ("> so\n> \\[\n> + a\n> \\]", ["\\[\n+ a\n\\]"]),
    (r"$a \\$ and \$5 and $b\$$", [r"$a \\$", r"$b\$$"]),
    (
        "# $x$ at $\\text{if $y$}$\n\n| $a$ | b |\n|---|---|\n| 1 | \\(c\\) |",
        ["$x$", "$\\text{if $y$}$", "$a$", "\\(c\\)"],
    ),
    ("It costs $5 and $10, or $5-$10, or US$5.", []),
    ("A $5 bill, or 6$ of it.", []),
    ("$HOME:$PATH and $ x $ and $$ and $ alone", []),
    ("`$x$` and `\\(` and\n```\n$$y$$\n```\n\n    \\[z\\]", []),
    ("see `a\\[` then `b`", []),
    ("write \\* and \\_ and \\# here", []),
    ("Open \\(a \\, b", ["\\(a \\, b"]),
    ("$$\n\\sum_i \\; i", ["$$\n\\sum_i \\; i"]),
    ("Open $\\alpha \\, b", ["$\\alpha \\, b"]),
    ("\\[\n- a \\,\n\nNext **bold**", ["\\[\n- a \\,"]),
]
"""Markdown, and the source of each formula in it."""


def test_formulas_are_told_from_prices_variables_and_code(view: Visit) -> None:
    view.go()
    assert [(text, rendered(view, text)["sources"]) for text, _ in FORMULAS] == FORMULAS


def test_no_backslash_is_lost_while_a_formula_arrives(view: Visit) -> None:
    view.go()
    for text in (
        "We have \\(a \\, b\\) here.",
        "$$\n\\int_0^1 x \\, dx \\\\\n= 1\n$$",
        "\\[\n\\{x\\}\n\\]",
    ):
        for end in range(len(text)):
            prefix = text[:end].removesuffix("\\")  # which may begin an escape yet
            shown = rendered(view, prefix)
            is_drawn = "<math" in shown["html"]  # which may be soon, once it is complete
            if prefix.count("\\") > 1 and not is_drawn:
                assert shown["text"].count("\\") == prefix.count("\\"), prefix


def answer(view: Visit, node: Node, text: str) -> None:
    node.chat.scripts["demo"] = says(Started((1,)), TextDelta(text, (1,)), FINISHED)
    send(view, "Go")
    wait_for_answer(view)


SHOWN = r"""## The Gaussian integral

With $f(x) = e^{-x^2}$ and \(r^2 = x^2 + y^2\), prices like $5 and $10 stay text:

$$\int_{-\infty}^{\infty} e^{-x^2} \, dx = \sqrt{\pi}$$

\[
\begin{align}
a &= b + \frac{1}{2} \\
-c &= \left\{ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \right\}
\end{align}
\]

$$\sum_{i=0}^{n} a_0 x^0
+ a_1 x^1 + a_2 x^2 + a_3 x^3 + a_4 x^4 + a_5 x^5 + a_6 x^6 + a_7 x^7 + a_8 x^8$$

Unknown stays: \(\nonsense{a\,b}\), and $\cancel{x} + \overline{AB} + \boxed{y}$ are drawn.
\(\longdiv{x}\) has no line.

مرحبا بالعالم، هذا نص عربي يحتوي على كلمة Python في الوسط، وينتهي بنقطة.

- عنصر أول
- عنصر ثانٍ مع $x^2$

| Model | Size | Tokens a second | Licence |
|:------|-----:|:---------------:|---------|
| Qwen3.6-27B | 16 GB | 24.5 | Apache-2.0 |
| gpt-oss-120b | 63 GB | 8.1 | Apache-2.0 |
| שלום עולם | 1 | 2 | x |

- [x] measured[^1]
- [ ] written

![a chart](https://example.org/chart.png)

[^1]: On one machine.
"""


@pytest.mark.parametrize(
    "look",
    [DESK, PHONE, DARK, {**PHONE, "color_scheme": "dark"}],
    ids=["desk", "phone", "dark", "dark-phone"],
)
def test_an_answer_is_shown_as_it_was_meant(
    browser: Browser, node: Node, look: dict[str, Any], request: Any
) -> None:
    with visit(browser, f"http://127.0.0.1:{node.port}", **look) as view:
        page = view.go()
        answer(view, node, SHOWN)
        said = answers(view)
        expect(said.locator("math")).to_have_count(7)
        expect(said.locator("code.tex")).to_have_text([r"\(\nonsense{a\,b}\)", r"\(\longdiv{x}\)"])
        expect(said).to_contain_text("prices like $5 and $10 stay text")
        directions = "all => all.map(one => [one.tagName, getComputedStyle(one).direction])"
        arabic = said.locator("p, ul").filter(has_text="ع")
        assert arabic.evaluate_all(directions) == [["P", "rtl"], ["UL", "rtl"]]
        cells = said.locator("tbody tr").first.locator("td")
        aligned = "all => all.map(one => getComputedStyle(one).textAlign.replace('-webkit-', ''))"
        assert cells.evaluate_all(aligned) == ["left", "right", "center", "start"]
        expect(said.locator("li.task")).to_have_text(["☑ measured1", "☐ written"])
        expect(said.locator(".footnote")).to_have_text("1 On one machine.")
        picture = said.get_by_role("link", name="Image: a chart")
        expect(picture).to_have_attribute("href", "https://example.org/chart.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert view.violations() == []
        view.shot(f"text-{request.node.callspec.id}")
        page.locator(".transcript").evaluate("box => (box.scrollTop = 0)")
        view.shot(f"text-top-{request.node.callspec.id}")
        assert all(each.url.startswith(view.base) for each in view.requests)


BOMB = "$$\\def\\a{" + "x" * 4_300 + "}" + "\\a" * 250 + "$$"
HOSTILE = [
    r"$\href{javascript:document.title=1}{a}$",
    r"$\includegraphics{http://127.0.0.1:9/a.png}$",
    r"$\style{position:fixed}{a}$",
    r"$\class{primary}{a}$ and $\def\a{\a\a}\a$",
    "$" + "\\sqrt{" * 140 + "a" + "}" * 140 + "$",
    "$$" + "{" * 2_000 + "a" + "}" * 2_000 + "$$",
    "$\\text{<img src=x onerror=document.title=1>}$",
    "$\\color{url(http://127.0.0.1:9/)}{a}$ $\\hspace{9000em}a$ $\\rule{9000em}{9000em}$",
    "![a](javascript:document.title=1) [![b](http://127.0.0.1:9/b.png)](http://127.0.0.1:9/)",
    "[^<img src=x>]: <script>document.title=1</script>\n\nSee[^<img",
]


def test_hostile_formulas_stay_text_and_hold_neither_the_page_nor_the_others(
    view: Visit, node: Node
) -> None:
    """A bomb would be computed for half a minute; the page gives each formula two seconds."""
    page = view.go()
    bombs = [BOMB.replace("x", letter) for letter in "xyz"]
    answer(view, node, "\n\n".join([*bombs, *HOSTILE, "and $e^x$ ends"]))
    said = answers(view)
    last = said.locator(".block").last
    expect(last.locator("math")).to_have_count(1, timeout=30_000)
    sources = said.locator("code.tex").all_text_contents()
    assert sources[:3] == bombs
    assert [each[:9] for each in sources[3:]] == [
        "$\\href{ja", "$\\include", "$\\style{p", "$\\class{p", "$\\def\\a{\\",
        "$${{{{{{{", "$\\color{u",
    ]  # fmt: skip
    assert said.locator("math :is(img, script, a, [style*=position], [style*=url])").count() == 0
    assert said.locator("a[href^=javascript]").count() == 0
    wide = said.locator("mspace").evaluate_all("all => all.map(one => one.getBoundingClientRect())")
    assert max(box["width"] for box in wide) < 1000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "exo-node"
    assert all(each.url.startswith(view.base) for each in view.requests)


def test_marks_without_an_end_are_read_in_bounded_time(view: Visit) -> None:
    """Each would take minutes if every mark were compared with all that follows."""
    view.go()
    for piece in ("$", "${", "\\(", "\\[\n", "$$\n", "$a\\", "`\\(", "[^"):
        assert len(rendered(view, piece * 20_000)["text"]) >= 20_000


def test_a_mark_of_a_note_stays_text_where_there_is_no_note(view: Visit) -> None:
    view.go()
    assert rendered(view, "Match [^abc] and [^1].\n\n[^1]: So.")["text"].split() == [
        "Match", "[^abc]", "and", "1.", "1", "So.",
    ]  # fmt: skip


def test_what_is_written_and_titles_turn_by_their_letters(view: Visit, node: Node) -> None:
    page = view.go()
    arabic = "اكتب قصة عن Python."
    page.get_by_label("Message").fill(arabic)
    turned = "one => getComputedStyle(one).direction"
    assert page.get_by_label("Message").evaluate(turned) == "rtl"
    node.chat.scripts["demo"] = says(
        Started((1,)), ReasoningDelta(arabic), TextDelta("So.", (1,)), FINISHED
    )
    page.keyboard.press("Enter")
    wait_for_answer(view)
    for place in (".question > p", ".thinking > div", "#conversations .title"):
        assert page.locator(place).evaluate(turned) == "rtl", place
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit", exact=True).click()
    assert page.get_by_label("Edit the question").evaluate(turned) == "rtl"


PARTS = {
    "strikes": "~~a" * 30_000,
    "code": "`a`b" * 15_000,
    "cells": "|" + "a|" * 100 + "\n|" + "-|" * 100 + ("\n|" + "1|" * 100) * 300,
    "paragraphs": "a\n\n" * 30_000,
    "formulas": " ".join(f"$x_{n}$" for n in range(10_000)),
    "displays": "\n\n".join(f"$$x_{n}$$" for n in range(10_000)),
    "lines": "```json\n" + '[1,"a"],\n' * 40_000 + "```",
}


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_an_answer_of_very_many_parts_is_drawn_in_part_and_nothing_is_lost(
    view: Visit, text: str
) -> None:
    """Each held the page for seconds at every redraw, ten thousand formulas for minutes."""
    view.go()
    shown = view.page.evaluate(
        """async (text) => {
          const { renderBlocks } = await import("/static/markdown.js");
          const all = document.createElement("div");
          const before = "# Before **it**\\n\\n";
          all.innerHTML = renderBlocks(before + text, new Map()).map((one) => one.__html).join("");
          return {
            elements: all.querySelectorAll("*").length,
            title: all.querySelector("h1 strong")?.textContent,
            notices: [...all.querySelectorAll(".notice")].map((one) => one.textContent),
            rest: all.querySelector(".written")?.textContent,
          };
        }""",
        text,
    )
    assert shown["elements"] < 15_000
    assert shown["title"] == "it"
    assert len(shown["notices"]) == 1 and "shown as it was written" in shown["notices"][0]
    assert text.rstrip().endswith(shown["rest"].rstrip()) and len(shown["rest"]) > len(text) / 3


def test_a_long_honest_answer_is_drawn_whole(view: Visit) -> None:
    view.go()
    part = "## Step $n$\n\nWith **all** of $x_1 + x_2$ and `code`:\n\n- one\n- two\n\n"
    part += "```py\na = 1\n```\n\n"
    assert "shown as it was written" not in rendered(view, part * 150)["text"]
    rows = "|a|b|c|d|\n|-|-|-|-|\n" + "|1|2|3|4|\n" * 700
    assert "shown as it was written" not in rendered(view, rows)["text"]


def test_a_page_that_draws_slowly_draws_less_often(view: Visit) -> None:
    view.go()
    before, after = view.page.evaluate(
        """async () => {
          const { renderBlocks, rest } = await import("/static/markdown.js");
          const before = rest(60);
          const now = performance.now.bind(performance);
          let ms = 0;
          performance.now = () => (ms += 500); // each look at the clock half a second later
          renderBlocks("a", new Map());
          performance.now = now;
          return [before, rest(60)];
        }"""
    )
    assert before == 60 and after == 2000
