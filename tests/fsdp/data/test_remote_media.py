"""Media by URL: nothing by default; where it is allowed, nothing that leads to hosts which are not public."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.decoding import remote_media
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.params.loader import load_config
from tests.fsdp.data.conftest import conversation, picture, write_jsonl
from tests.helpers.tiny_media import picture_bytes, write_video
from tests.helpers.tiny_processors import save_processor
from tests.helpers.tiny_sounds import sound_bytes, tone

PICTURE = picture_bytes(picture(20, 10))
ALLOWED = MediaLimits(allow_remote=True)


class Site(BaseHTTPRequestHandler):
    """What the paths of a test's server answer."""

    files: dict[str, bytes] = {}
    let_go = threading.Event()
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path in self.files:
            return self._send(200, self.files[self.path])
        if self.path.startswith("/to/"):
            return self._send(302, b"", Location=self.path.removeprefix("/to/"))
        if self.path == "/circle":
            return self._send(302, b"", Location="/circle")
        if self.path == "/cut":
            return self._send(200, PICTURE[:20], **{"Content-Length": str(len(PICTURE))})
        if self.path == "/slow":
            self._send(200, PICTURE[:20], **{"Content-Length": str(len(PICTURE))}, hold="yes")
            return None
        if self.path == "/drip":
            return self._drip()
        return self._send(404, b"")

    def _drip(self) -> None:
        """A header that never ends, a few letters at a time."""
        self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while not self.let_go.wait(0.05):
            self.wfile.write(b"x")
            self.wfile.flush()

    def _send(self, status: int, body: bytes, hold: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if hold:
            self.wfile.flush()
            self.let_go.wait(30)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    video = write_video(tmp_path / "a.mp4", [0, 100, 200, 250] * 4).read_bytes()
    Site.files = {"/a.png": PICTURE, "/a.mp4": video, "/a.wav": sound_bytes(tone(0.5, 16000), 16000), "/empty": b""}
    Site.let_go.clear()
    Site.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Site.let_go.set()
    server.shutdown()
    server.server_close()


def loader(folder: Path, *roots: str, limits: MediaLimits = ALLOWED) -> MediaLoader:
    return MediaLoader(folder, roots, limits)


def test_nothing_is_fetched_by_default(tmp_path: Path, site: str) -> None:
    with pytest.raises(DataError, match=r"is a URL: only local files are opened.*allow_remote_media: true"):
        loader(tmp_path, site, limits=MediaLimits()).load_image(f"{site}/a.png")
    assert not Site.asked


def test_pictures_videos_and_sounds_of_a_host_of_ones_own(tmp_path: Path, site: str) -> None:
    media = loader(tmp_path, f"{site}/")
    assert media.load_image(f"{site}/a.png").size == (20, 10)
    assert media.load_image({"path": f"{site}/to//a.png"}).size == (20, 10)
    assert len(media.load_video(f"{site}/a.mp4").frames) == 2
    assert media.load_audio(f"{site}/a.wav").seconds == 0.5
    assert media.probe("audio", f"{site}/a.wav").samples == 8000  # type: ignore[union-attr]


def test_through_the_configuration(tmp_path: Path, site: str) -> None:
    (tmp_path / "model").mkdir()
    save_processor("qwen3_vl", tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", [conversation(images=[f"{site}/a.png"])])
    text = f"""
data:
  dataset_param:
    basic_parameters:
      {{dataset: rows.jsonl, dataset_dir: "{tmp_path}", allow_remote_media: true, media_roots: ["{site}/"]}}
    preprocess_parameters: {{model_name_or_path: "{tmp_path}/model"}}
"""
    (tmp_path / "run.yaml").write_text(text)
    section = load_config(tmp_path / "run.yaml").arguments.data.dataset_param
    assert section.basic_parameters.media_roots == (f"{site}/",)
    assert len(build_mm_dataset(section)[0][0]["media"]) == 1
    assert Site.asked == ["/a.png"]


def test_hosts_that_are_not_public_are_not_asked(tmp_path: Path, site: str) -> None:
    port = site.rsplit(":", 1)[1]
    for url in (f"{site}/a.png", f"http://localhost:{port}/a.png", f"http://[::ffff:127.0.0.1]:{port}/a.png"):
        with pytest.raises(DataError, match="an address that is not public") as caught:
            loader(tmp_path).load_image(url)
        assert caught.value.problems[0].key == "data.dataset_param.basic_parameters.media_roots"
    assert not Site.asked


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/to/http://localhost:{port}/a.png", "an address that is not public"),
        ("/to/file:///etc/passwd", "is not an address of the web"),
        ("/to/ftp://127.0.0.1/a.png", "is not an address of the web"),
        ("/circle", "more than 5 redirects"),
        ("/none.png", "answers 404"),
        ("/cut", "broke off|cannot be fetched"),
        ("/empty", "is empty"),
    ],
)
def test_what_is_answered_wrongly(tmp_path: Path, site: str, path: str, message: str) -> None:
    port = site.rsplit(":", 1)[1]
    with pytest.raises(DataError, match=message):
        loader(tmp_path, site).load_image(site + path.format(port=port))
    assert "/a.png" not in Site.asked


def test_bounds_of_bytes_and_of_time(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"has {len(PICTURE)} bytes, more than 100"):
        remote_media.fetch(f"{site}/a.png", [site], 100)
    assert remote_media.fetch(f"{site}/a.png", [site], len(PICTURE)) == PICTURE
    monkeypatch.setattr(remote_media, "MOST_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"cannot be fetched: (timed out|not done)"):
        remote_media.fetch(f"{site}/slow", [site], 10**6)


@pytest.mark.edge("S14")
def test_a_header_that_drips_is_cut_off_at_the_limit(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_media, "MOST_SECONDS", 0.5)
    threading.Timer(8.0, Site.let_go.set).start()  # for a reader that would wait for ever
    started = time.monotonic()
    with pytest.raises(DataError, match=r"/drip' cannot be fetched: not done after"):
        remote_media.fetch(f"{site}/drip", [site], 10**6)
    assert time.monotonic() - started < 5


def test_data_urls(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    assert loader(tmp_path).load_image(url).size == (20, 10)
    assert loader(tmp_path, limits=MediaLimits()).load_image(url).size == (20, 10)  # nothing is fetched for it
    with pytest.raises(DataError, match="is not an address of the web"):
        loader(tmp_path).load_image("file:///etc/passwd")


@pytest.mark.parametrize(
    ("url", "lies_in"),
    [
        ("http://10.0.0.5/data/a.png", True),
        ("http://10.0.0.5/a.png", False),
        ("http://10.0.0.5/data/../a.png", False),
        ("http://10.0.0.5.example/data/a.png", False),
        ("http://10.0.0.5:81/data/a.png", False),
        ("https://10.0.0.5/data/a.png", False),
        ("http://me@10.0.0.5/data/a.png", False),
    ],
)
def test_what_lies_in_a_root(url: str, lies_in: bool) -> None:
    assert remote_media._lies_in(remote_media._parts(url), "http://10.0.0.5/data/") == lies_in


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
        ("::1", False),
        ("fc00::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
    ],
)
def test_public_addresses(address: str, is_public: bool) -> None:
    assert remote_media._is_public(address) == is_public
