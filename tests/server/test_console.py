"""The console in Debian's Chromium, in front of a real server (apt-get install chromium chromium-driver)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from export.relayout import relayout
from live.exposures import Exposure, ExposureLog
from repository.experiments import end_experiment, find_experiment_folder, start_experiment
from server.generations.challenger import load_challenger
from serving.contract.tensors import ENSEMBLE, STAGES
from serving.live.experiment import Experiment
from serving.stages.rules.config import RulesConfig
from tests.repositories import small_repository
from tests.server.support.gateways import USER, Served, served_gateway
from tests.server.test_publication import with_rules
from tests.waiting import until

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 180
# Holds back what is asked about a user until `release()`; `answered` lists what was asked about the user and answered.
HOLD = """
const send = window.fetch, user = arguments[0];
let holds = true;
window.held = [];
window.answered = [];
window.fetch = async (path, options) => {
  const isHeld = path.includes(`users/${user}`) || path.includes(`user=${user}`);
  if (isHeld && holds) await new Promise((resolve) => held.push(resolve));
  const response = await send(path, options);
  if (isHeld) window.answered.push(path);
  return response;
};
window.release = () => { holds = false; held.forEach((resolve) => resolve()); };
"""
# Gives the first recommended item another id, and keeps the events that the page posts.
RENAME = """
const send = window.fetch, id = arguments[0];
window.fetch = async (path, options) => {
  if (options.method === "POST") window.posted = options.body;
  const response = await send(path, options);
  if (!path.includes("/recommendations")) return response;
  return new Response((await response.text()).replace(/"id": *\\d+/, `"id": ${id}`), { headers: response.headers });
};
"""
MARKUP = "<img src=x onerror=document.title='broken'>Mug"

if not (CHROMIUM and DRIVER):
    pytest.skip("needs chromium and chromedriver on PATH: apt-get install chromium chromium-driver", allow_module_level=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with served_gateway(tmp_path_factory.mktemp("console")) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    assert CHROMIUM is not None  # otherwise skipped
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


class Page:
    def __init__(self, browser: webdriver.Chrome, served: Served) -> None:
        self.browser, self.origin = browser, f"http://127.0.0.1:{served.port}"

    def open(self, user: int | None = None, session: str = "") -> None:
        self.browser.get("about:blank")  # so that another user in the address loads the page anew
        address = f"#session={session}" if session else f"#user={user}" if user is not None else ""
        self.browser.get(f"{self.origin}/{address}")
        if address:
            self.wait(lambda: self.items())

    def wait(self, condition) -> None:
        changing = [StaleElementReferenceException]  # while the page shows the next answer
        WebDriverWait(self.browser, WAIT_S, ignored_exceptions=changing).until(lambda _: condition(), self.text("message"))

    def text(self, id: str) -> str:
        return self.browser.find_element(By.ID, id).text

    def lines(self, id: str) -> list:
        return self.browser.find_elements(By.CSS_SELECTOR, f"#{id} li")

    def press(self, id: str) -> None:
        self.browser.find_element(By.ID, id).click()

    def items(self, id: str = "list") -> list[str]:
        return [line.get_attribute("data-item") for line in self.lines(id)]


@pytest.fixture
def page(browser, served) -> Page:
    return Page(browser, served)


def test_the_page_loads_and_says_who_answers(page):
    page.open()
    page.wait(lambda: page.text("health") == "ready")
    assert page.lines("list") == []


def test_the_page_says_that_a_server_has_not_moved_to_the_pinned_generation(page, served):
    config = served.server.repo / ENSEMBLE / "config.pbtxt"
    published = config.read_text()
    config.write_text(re.sub(r"(model_version|versions): 1\b", r"\1: 2", published))
    page.open()
    page.wait(lambda: page.text("health") == "ready, but generation 2 is pinned")
    config.write_text(published)
    page.open()
    page.wait(lambda: page.text("health") == "ready")


def test_a_gateway_that_ends_and_comes_back_is_told_without_a_click(page):
    page.open(USER)
    page.browser.execute_script("window.send = fetch; fetch = async () => { throw new TypeError('Failed to fetch'); };")
    page.wait(lambda: page.text("health") == "the gateway does not answer")
    page.browser.find_element(By.CSS_SELECTOR, "#list button.item").click()
    page.wait(lambda: page.text("message").startswith("The gateway does not answer: it is down, or starts again. Try again"))
    latency = page.text("latency")
    page.browser.execute_script("fetch = window.send;")
    page.wait(lambda: page.text("health") == "ready")
    assert page.text("latency") == latency  # of the last request that a person made


def test_a_click_changes_the_list_and_says_how_fast(page):
    page.open(USER)
    before = page.items()
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.item").click()
    page.wait(lambda: "durable after" in page.text("change"))
    assert "ms later" in page.text("change")
    assert before[0] not in page.items()
    page.wait(lambda: page.items("history")[:1] == before[:1])
    assert page.text("generation") == "1"
    assert "ms" in page.text("latency")


def test_an_id_of_64_bits_is_posted_as_it_is(page):
    item = str(2**60 + 1)
    page.open(USER + 90)
    page.browser.execute_script(RENAME, item)
    page.browser.find_element(By.ID, "visitor").send_keys("\n")
    page.wait(lambda: page.items()[:1] == [item])
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.item").click()
    page.wait(lambda: page.browser.execute_script("return window.posted"))
    assert json.loads(page.browser.execute_script("return window.posted"))["item"] == item


def test_a_list_is_only_shown_while_its_user_is_followed(page, served):
    """An item of another user's list would be posted as an event of the wrong user."""
    page.open(USER)
    page.browser.execute_script(HOLD, USER + 1)
    box = page.browser.find_element(By.ID, "visitor")

    def follow(user: int) -> None:
        box.clear()
        box.send_keys(f"{user}\n")

    follow(USER + 1)
    assert (page.items(), page.items("history")) == ([], [])
    page.wait(lambda: page.browser.execute_script("return held.length"))
    follow(USER + 2)
    page.wait(lambda: page.items())
    page.browser.execute_script("release()")
    page.wait(lambda: any("/recommendations" in path for path in page.browser.execute_script("return answered")))
    mine, theirs = (
        [str(item["id"]) for item in served.recommend(user=user, fallback="none")["items"]] for user in (USER + 2, USER + 1)
    )
    assert page.items() == mine != theirs


def test_the_time_of_a_list_is_shown_by_part(page):
    page.open(USER)
    rows = [row.text for row in page.browser.find_elements(By.CSS_SELECTOR, "#waterfall tr")]
    assert [row.rsplit(" ", 2)[0] for row in rows] == ["page and network", "way to the server", *STAGES, "gateway"]
    assert all(float(row.rsplit(" ", 2)[1]) >= 0 and row.endswith(" ms") for row in rows)
    bars = [bar.rect for bar in page.browser.find_elements(By.CSS_SELECTOR, "#waterfall .part")]
    for before, bar in pairwise(bars):
        assert bar["x"] == pytest.approx(before["x"] + before["width"], abs=2)


def test_the_quality_of_the_generation_is_shown(page, served):
    page.open(USER)
    quality = served.http.get("/v1/generation").raise_for_status().json()["quality"]
    page.wait(lambda: page.text("quality").startswith("NDCG@10"))
    assert page.text("quality") == f"NDCG@10 {quality['ndcg_at_10']:.3f}, Recall@20 {quality['recall_at_20']:.3f}"


def test_an_unknown_user_is_shown_as_such(page):
    page.open(999_999)
    assert "This user is unknown" in page.text("known")
    assert page.items("history") == []


def test_any_item_can_be_asked_about(page):
    page.open(USER)
    page.wait(lambda: page.items("history"))
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.small").click()
    page.wait(lambda: "It is shown at place 1" in page.text("why"))
    assert [row.split()[0] for row in page.text("why").splitlines()[1:5]] == ["retrieve", "rank", "rerank", "rules"]
    assert "by what sold lately" in page.text("why")
    page.wait(lambda: page.items("similar"))
    box = page.browser.find_element(By.ID, "item")
    box.clear()
    box.send_keys(page.items("history")[0] + "\n")
    page.wait(lambda: "The user has seen it already." in page.text("why"))


def test_a_session_is_followed_like_a_user(page, served):
    page.open(session="a3f")
    assert page.text("known") == "This session is unknown: a cold start."
    assert page.items("history") == []
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.item").click()
    page.wait(lambda: page.items("history"))
    assert page.text("known") == "1 counted events"
    [seen] = page.items("history")
    assert seen not in page.items()
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.small").click()
    page.wait(lambda: "It is shown at place 1" in page.text("why"))
    box = page.browser.find_element(By.ID, "item")
    box.clear()
    box.send_keys(seen + "\n")
    page.wait(lambda: "The user has seen it already." in page.text("why"))


def test_a_title_with_markup_is_shown_as_text(page, served):
    page.open(USER)
    item = page.items()[0]
    assert served.http.put(f"/v1/items/{item}", json={"title": MARKUP}).status_code == 200
    page.open(USER)
    assert MARKUP in page.text("list")
    assert page.browser.find_elements(By.CSS_SELECTOR, "main img") == []
    assert page.browser.title == "Recommender console"


def test_a_long_title_without_spaces_makes_the_page_no_wider(page, served):
    page.open(USER)
    item = page.items()[0]
    assert served.http.put(f"/v1/items/{item}", json={"title": "M" + 2_000 * "u" + "g"}).status_code == 200
    page.open(USER)
    page.lines("list")[0].find_element(By.CSS_SELECTOR, "button.small").click()
    page.wait(lambda: "uuu" in page.text("why"))
    width, window = page.browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window


def test_a_narrow_page_is_no_wider_than_its_window(page):
    size = {"width": 320, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(USER)
        page.wait(lambda: "ms" in page.text("latency"))
        assert page.browser.execute_script("return document.documentElement.scrollWidth") == size["width"]
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_back_and_forward_follow_who_was_followed(page):
    def is_followed(kind: str, visitor: str, known: str) -> bool:
        followed = [page.browser.find_element(By.ID, id).get_property("value") for id in ("kind", "visitor")]
        return followed == [kind, visitor] and known in page.text("known") and bool(page.items())

    page.open(USER)
    page.browser.execute_script("location.hash = 'session=a%26b%3D%C3%BC'")
    page.wait(lambda: is_followed("session", "a&b=ü", "unknown"))
    page.browser.back()
    page.wait(lambda: is_followed("user", f"{USER}", "counted events"))
    page.browser.forward()
    page.wait(lambda: is_followed("session", "a&b=ü", "unknown"))


def test_no_request_leaves_the_origin_and_no_policy_is_broken(page):
    page.browser.get_log("performance")
    page.browser.get_log("browser")
    page.open(USER)
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    urls = [sent["params"]["request"]["url"] for sent in messages if sent["method"] == "Network.requestWillBeSent"]
    asked = [url for url in urls if urlsplit(url).scheme in ("http", "https", "ws", "wss")]
    assert any("/v1/recommendations" in url for url in asked)
    assert [url for url in asked if not url.startswith(page.origin + "/")] == []
    assert [entry["message"] for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_token_is_sent_where_one_is_given(page):
    page.open()
    page.browser.find_element(By.ID, "token").send_keys("secret")
    page.browser.find_element(By.ID, "visitor").send_keys(f"{USER}\n")
    page.wait(lambda: page.items())
    messages = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    requests = [sent["params"]["request"] for sent in messages if sent["method"] == "Network.requestWillBeSent"]
    asked = [request for request in requests if "/v1/recommendations" in request["url"]]
    assert asked[-1]["headers"]["authorization"] == "Bearer secret"


def test_without_an_experiment_the_page_says_so(page):
    page.open(USER)
    page.press("to-experiment")
    page.wait(lambda: page.text("settings") == "No experiment runs.")
    assert page.text("decision") == "No experiment was started"
    assert page.items("champion") == page.items("challenger") == []
    assert not page.browser.find_element(By.ID, "list").is_displayed()


def test_an_experiment_shows_both_lists_the_interval_and_the_decision(page, served, tmp_path):
    """The last test: afterwards the repository has another generation, and an experiment that ended."""
    first, *_ = (item["id"] for item in served.recommend()["items"])
    repo = served.server.repo
    relayout(with_rules(small_repository(), tmp_path / "other", RulesConfig(blocked_items=(first,))), repo, "fused")
    load_challenger(served.server.grpc_url, repo, 2)
    page.open(USER)  # before the experiment, which would count this answer
    experiment = start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    answer_and_click(served, experiment, champion=0.1, challenger=0.6)
    # a report is kept for some seconds, and another test may have asked
    until(lambda: count_answers(served) == [200, 200], lambda: f"the report counts {count_answers(served)} answers")
    page.press("to-experiment")
    page.wait(lambda: page.items("challenger"))
    assert "spring: mode ab, generation 2 beside 1, 50.0 % of the users, since 20" in page.text("settings")
    assert page.text("decision") == "The challenger is better beyond doubt"
    assert "champion 200 20 (10.00 %) 20 (10.00 %)" in page.text("arms")
    assert page.text("split") == "200 users met the champion and 200 the challenger, which a share of 0.5 explains."
    assert page.browser.find_elements(By.CSS_SELECTOR, "#interval svg polygon")
    assert ": now 25.24 to 74.76 percentage points" in page.text("interval")

    champion, challenger = page.items("champion"), page.items("challenger")
    assert str(first) in set(champion) - set(challenger)
    assert notes(page, "champion") == ["" if item in challenger else "only here" for item in champion]
    climbed = [champion.index(item) - place if item in champion else None for place, item in enumerate(challenger)]
    assert notes(page, "challenger") == [
        "only here" if places is None else f"▲ {places}" if places > 0 else f"▼ {-places}" if places else "="
        for places in climbed
    ]
    assert 1 in climbed

    end_experiment(repo, "its p99 is 200 ms", state="rolled back")
    page.wait(lambda: page.press("refresh") or page.text("decision") == "Rolled back: its p99 is 200 ms")
    assert page.text("settings").startswith("No experiment runs. The last one was spring")
    page.wait(lambda: page.items("challenger"))  # until it is unloaded


def count_answers(served: Served) -> list[int]:
    """Return the answers of each arm, as the gateway reports them."""
    return [arm["answers"] for arm in served.http.get("/v1/experiment").raise_for_status().json()["arms"]]


def notes(page: Page, id: str) -> list[str]:
    """Return what stands behind each item of a list."""
    return [line.find_element(By.CSS_SELECTOR, ".number").text for line in page.lines(id)]


def answer_and_click(served: Served, experiment: Experiment, **click_rates: float) -> None:
    """Log 200 answers of each arm, of the items 1 and 2, and post the clicks on them."""
    log = ExposureLog(find_experiment_folder(served.server.repo), 1.0, keep_days=1, keep_bytes=1 << 30)
    clicks = []
    for arm, click_rate in click_rates.items():
        for number in range(200):
            request_id = f"{arm}{number}"
            time_ms = experiment.changed_ms + number
            facts, share = (experiment.name, arm), experiment.find_assignment(arm)
            log.add(Exposure(request_id, time_ms, number, 1, [1, 2], [1.0] * 2, [], *facts, assignment=share))
            if number % 10 < 10 * click_rate:
                clicks.append({"user": 1_000 + number, "item": 1, "request_id": request_id})
    log.close()
    assert served.http.post("/v1/events", json=clicks).status_code == 200
