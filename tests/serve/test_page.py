"""The playground in a real browser: write, watch, fill gaps, repair, be refused, lose the server and find it again.

What the page shows as curl and Python is run, and must print what the page shows.

Debian: apt-get install chromium chromium-driver. Without them these tests are skipped.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
import time

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains

import fsdfm
from live_server import serving

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here: apt-get install chromium chromium-driver"
    ),
    pytest.mark.filterwarnings("ignore"),
]


class Page:
    """What a person does with the page."""

    def __init__(self, driver):
        self.driver = driver

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def until(self, code, seconds=90):
        end = time.monotonic() + seconds
        while not (found := self.js(f"return {code}")):
            assert time.monotonic() < end, f"never: {code}"
            time.sleep(0.1)
        return found

    def visit(self, url):
        self.driver.get(url)
        self.until("document.getElementById('server').dataset.state === 'up'")

    def put(self, name, value):
        code = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        self.js(f"{code} e.dispatchEvent(new Event('input'))", name, str(value))

    def press(self, name):
        self.driver.find_element("id", name).click()

    def go(self):
        self.press("go")
        self.until("document.getElementById('go').getAttribute('aria-disabled') !== 'true'")

    def text(self):
        return self.js("return document.querySelector('#results .text')?.textContent")

    def message(self):
        return self.js("const m = document.getElementById('message'); return m.hidden ? '' : m.textContent")


@pytest.fixture(scope="module")
def page():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def live():
    with serving() as live:
        yield live


def shown(text):
    """As the page shows it: controls and line breaks made visible; letters alone are compared."""
    text = re.sub(r"\\u\{\w+\}", "", text)
    return [character for character in text if character.isascii() and character.isalnum()]


def test_a_text_is_written_step_by_step_and_can_be_walked_through(page, live):
    page.visit(live.url)
    box = page.driver.find_element("id", "prompt")
    box.clear()
    box.send_keys("abc")
    page.put("room", 16)
    page.put("steps", 4)
    page.put("seed", 3)
    page.go()
    made = live.models["tiny"].generate("abc", length=1 + 3 + 16, steps=4, seed=3)
    assert page.js("return [...document.querySelectorAll('#results .text > span')].length") == len(made.tokens)
    assert page.js("return document.querySelector('#results .bar input').max") == "4"
    assert "4 calls" in page.js("return document.querySelector('#results .calls').textContent")
    last = page.text()
    page.js("const s = document.querySelector('#results .bar input'); s.value = 0; s.dispatchEvent(new Event('input'))")
    assert page.text() != last
    assert page.js("return document.querySelectorAll('#results .text [class^=k]:not(.kept)').length") == 0
    assert "seed" in page.js("return document.getElementById('curl').textContent")
    assert f"length={1 + 3 + 16}" in page.js("return document.getElementById('library').textContent")


def test_the_same_noise_goes_through_two_models(page, live):
    page.visit(live.url)
    page.put("room", 16)
    page.put("steps", 2)
    page.press("compare")
    page.go()
    names = page.js("return [...document.querySelectorAll('#results article')].map((a) => a.dataset.model)")
    assert names == ["tiny", "chain"]


def test_words_become_gaps_and_gaps_are_filled(page, live):
    page.visit(live.url)
    page.press("tab-gaps")
    page.put("gaps", "one two three")
    page.js("document.querySelectorAll('#words .word')[1].click()")
    assert page.js("return document.getElementById('gaps').value") == "one [[1]] three"
    page.js("const s = document.querySelector('#words input'); s.value = 5; s.dispatchEvent(new Event('input'))")
    assert page.js("return document.getElementById('gaps').value") == "one [[5]] three"
    page.put("steps", 2)
    page.put("seed", 1)
    page.go()
    expected = live.models["tiny"].infill("one [[5]] three", steps=2, seed=1).text
    assert shown(page.text())[:3] == shown(expected)[:3]
    page.js("document.querySelector('#words .gap button').click()")
    assert page.js("return document.getElementById('gaps').value") == "one two three"  # a word that was a gap
    page.put("gaps", "one [[4]] three")
    page.js("document.querySelector('#words .gap button').click()")
    assert page.js("return document.getElementById('gaps').value") == "one three"


def test_a_gap_is_opened_and_dragged_with_the_mouse(page, live):
    page.visit(live.url)
    page.press("tab-gaps")
    page.put("gaps", "one two three four")
    page.driver.find_elements("css selector", "#words .word")[2].click()
    assert page.js("return document.getElementById('gaps').value") == "one two [[2]] four"
    assert page.js("return document.activeElement.type") == "range"  # not the text: a phone would bring its keyboard
    slider = page.driver.find_element("css selector", "#words .gap input")
    half = slider.size["width"] // 2
    ActionChains(page.driver).move_to_element(slider).move_by_offset(4 - half, 0).click_and_hold().move_by_offset(
        half, 0
    ).release().perform()
    tokens = int(page.js("return document.querySelector('#words .gap output').textContent"))
    assert 10 <= tokens <= 30
    assert page.js("return document.getElementById('gaps').value") == f"one two [[{tokens}]] four"
    page.driver.find_element("css selector", "#words .gap button").click()
    assert page.js("return document.activeElement.textContent") == "three"


def test_a_damaged_text_is_repaired_and_what_changed_is_seen(page, live):
    page.visit(live.url)
    page.press("tab-repair")
    page.put("damaged", "a text that is long enough")
    page.put("steps", 2)
    page.go()
    assert page.js("return document.querySelectorAll('#results .text .marked').length") == 13
    assert "Before" in page.js("return document.querySelector('#results .asked').textContent")


def test_a_text_without_damage_is_said_to_have_none(page, live):
    page.visit(live.url)
    page.press("tab-repair")
    assert not page.js("return document.getElementById('blind-row').hidden")
    page.put("corrupt", "")
    assert page.js("return document.getElementById('blind-row').hidden")
    page.put("damaged", "a text")
    page.put("steps", 2)
    page.go()
    assert not any(live.models["tiny"].repair("a text", steps=2, seed=2).replaced)
    assert "changed nothing" in page.js("return document.querySelector('#results article').textContent")


def test_the_code_is_of_the_text_that_is_seen(page, live):
    page.visit(live.url)
    page.put("prompt", "abc")
    page.put("room", 8)
    page.press("go")
    page.press("tab-gaps")  # while the text is on its way
    page.until("document.getElementById('go').getAttribute('aria-disabled') !== 'true'")
    assert "/v1/completions" in page.js("return document.getElementById('curl').textContent")
    assert "lm.generate" in page.js("return document.getElementById('library').textContent")


SPEECH = 'He said: "It\'s a true \\ false null" \n and été.'


@pytest.mark.parametrize("mode", ["write", "ends", "gaps", "repair", "blind", "found"])
def test_the_code_makes_the_text_that_is_seen(page, live, mode, monkeypatch):
    pytest.importorskip("openai", reason="the openai package is not installed")
    page.visit(live.url)
    page.put("steps", 2)
    page.put("seed", 3)
    page.put("temperature", 0.7)
    if mode in ("write", "ends"):
        page.put("prompt", SPEECH[:15])
        page.put("suffix", SPEECH[:4] if mode == "ends" else "")
        page.put("room", 8)
    elif mode == "gaps":
        page.press("tab-gaps")
        page.put("gaps", SPEECH[:20] + "[[4]]")
    else:
        page.press("tab-repair")
        page.put("damaged", SPEECH[:30])
        page.put("corrupt", "" if mode == "found" else "0.5")
        if mode == "blind":
            page.press("blind")
    page.go()
    assert page.message() == ""
    code = {
        name: page.js(f"return document.getElementById('{name}').textContent") for name in ("curl", "python", "library")
    }
    monkeypatch.setattr(fsdfm, "load", live.models.__getitem__, raising=False)
    printed = {}
    for name in ("python", "library"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code[name], {})
        printed[name] = out.getvalue()[:-1]
    assert shown(printed["library"]) == shown(page.text())
    assert printed["python"]
    assert printed["python"] in printed["library"]
    if shutil.which("curl"):
        answer = subprocess.run(["sh", "-c", code["curl"] + " -sS"], capture_output=True, check=True).stdout
        assert json.loads(answer)["choices"][0]["text"] == printed["python"]


def test_there_is_something_to_watch_unless_somebody_wants_less(page, live):
    page.visit(live.url)
    assert int(page.js("return document.getElementById('steps').value")) >= 4
    page.put("steps", 1)
    page.put("model", "chain")
    page.js("document.getElementById('model').dispatchEvent(new Event('change'))")
    assert page.js("return document.getElementById('steps').value") == "1"


def test_keyboard_and_screen_reader_are_not_lost(page, live):
    page.visit(live.url)
    page.put("room", 16)
    page.put("steps", 3)
    page.driver.find_element("id", "go").send_keys("\ue007")  # enter
    page.until("document.querySelector('#results .facts')?.getAttribute('aria-busy') === 'false'")
    assert page.js("return document.activeElement.id") == "go"
    assert page.js("return document.querySelector('#results .text').getAttribute('role')") == "group"
    play = page.driver.find_element("css selector", "#results .bar button")
    play.click()
    assert play.get_attribute("aria-label") == "Pause"
    page.until("document.querySelector('#results .bar button').getAttribute('aria-label') === 'Play the steps'")
    names = """return [...document.querySelectorAll('button, input, select, textarea')].filter((e) => e.offsetParent)
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
        .map((e) => e.outerHTML)"""
    assert page.js(names) == []


def test_steps_are_told_without_colour(page, live):
    page.visit(live.url)
    page.put("room", 16)
    page.put("steps", 3)
    page.go()
    number = "return getComputedStyle(document.querySelector('#results .text [data-bin]'), '::after').content"
    assert page.js(number) == "none"
    page.js("document.querySelector('#results figcaption input').click()")
    assert page.js(number).strip('"') in "123"
    legend = page.js("return document.querySelector('#results .legend').textContent")
    assert "step" in legend
    assert "given" in legend
    counts = "return [...document.querySelectorAll('#results .legend li')].map((e) => +e.textContent.split(' ').pop())"
    assert sum(page.js(counts)) == page.js("return document.querySelectorAll('#results .text > span').length")


def test_markup_is_shown_and_never_run(page, live):
    page.visit(live.url)
    page.put("prompt", "<img src=x onerror='window.hurt=1'>")
    page.put("room", 8)
    page.put("steps", 1)
    page.go()
    assert "<img src=x onerror=" in page.text()
    assert page.js("return document.querySelectorAll('#results img').length") == 0
    assert not page.js("return window.hurt")


def test_a_refusal_is_said_in_words(page, live):
    page.visit(live.url)
    page.press("tab-gaps")
    page.put("gaps", "no gap at all")
    page.go()
    assert "the text has no gap" in page.message()
    page.press("tab-write")
    page.put("room", 8)
    page.go()
    assert page.message() == ""


def test_tabs_answer_to_the_keyboard(page, live):
    page.visit(live.url)
    page.driver.find_element("id", "tab-write").send_keys("\ue014")  # right arrow
    assert page.js("return document.activeElement.id") == "tab-gaps"
    page.driver.find_element("id", "tab-gaps").send_keys("\ue010")  # end
    assert page.js("return document.activeElement.id") == "tab-repair"
    page.driver.find_element("id", "tab-repair").send_keys("\ue014")  # round
    assert page.js("return document.activeElement.id") == "tab-write"
    page.driver.find_element("id", "tab-write").send_keys("\ue014")
    assert not page.js("return document.getElementById('panel-gaps').hidden")


def test_no_page_is_wider_than_a_phone(page, live):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.visit(live.url)
        for tab in ("write", "gaps", "repair"):
            page.press(f"tab-{tab}")
            assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_server_that_goes_is_missed_and_found_again(page):
    with serving() as live:
        port = live.port
        page.visit(live.url)
    page.go()
    assert "does not answer" in page.message()
    page.until("document.getElementById('server').dataset.state === 'down'")
    with serving(port=port):
        page.until("document.getElementById('server').dataset.state === 'up'")
        page.put("room", 8)
        page.put("steps", 1)
        page.go()
        assert page.message() == ""


def test_a_key_is_asked_for(page):
    key = "0123456789abcdef"
    with serving(api_key=key) as live:
        page.driver.get(live.url)
        page.until("!document.getElementById('key-row').hidden")
        page.put("key", key)
        page.js("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.until("document.getElementById('server').dataset.state === 'up'")
