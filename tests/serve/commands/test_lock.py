from __future__ import annotations

from omegaconf import OmegaConf

from treadle.conf.lock import from_lock
from treadle.graph.resolve import resolve
from treadle.serve.__main__ import main

DUMMY = ["model=qwen3-0.6b", "hardware.memory=64GiB", "kv.page_tokens=32"]


def test_the_file_holds_every_choice_and_starts_the_same_server(tmp_path, capsys):
    path = tmp_path / "server.lock.yaml"
    assert main(["lock", *DUMMY, "--output", str(path)]) == 0
    lock = OmegaConf.load(path)
    assert lock.fingerprint in capsys.readouterr().out
    flat = OmegaConf.to_yaml(lock.deployment)
    assert ": auto" not in flat.replace("kernels: auto", "")
    assert lock.deployment.model.max_len == 40960
    found = resolve(from_lock(path))
    assert found.fingerprint == lock.fingerprint
    assert lock.facts.num_pages == found.plan.num_pages


def test_without_a_file_it_is_printed_and_reads_back(tmp_path, capsys):
    assert main(["lock", *DUMMY]) == 0
    first = capsys.readouterr().out
    (tmp_path / "x.yaml").write_text(first)
    assert main(["lock", "--lock", str(tmp_path / "x.yaml")]) == 0
    assert capsys.readouterr().out == first


def test_single_keys_may_change_on_top_of_a_lock(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    main(["lock", *DUMMY, "--output", str(path)])
    capsys.readouterr()
    assert main(["lock", "--lock", str(path), "scheduler.max_num_seqs=4"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).deployment.scheduler.max_num_seqs == 4
