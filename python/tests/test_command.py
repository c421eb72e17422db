"""python -m longspan doctor looks at the installed packages before the command looks at the machine."""

import pathlib

import pytest

import longspan
from longspan.__main__ import main, package_problems


def install(folder, name, version):
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def test_two_copies_are_named(packages):
    install(packages, "longspan", "0.1.0")
    assert list(package_problems()) == []
    install(packages, "longspan_cpu", "0.2.0")
    (problem,) = package_problems()
    assert "longspan 0.1.0" in problem and "longspan_cpu 0.2.0" in problem and "pip uninstall" in problem


@pytest.mark.parametrize("version, fine", [("2.3.1+cpu", False), ("2.4.0", True), ("2.15.0a0+git123", True)])
def test_an_old_torch_is_named(packages, version, fine):
    install(packages, "torch", version)
    problems = list(package_problems())
    assert not problems if fine else version in problems[0] and "pip install --upgrade torch" in problems[0]


def test_doctor_fails_with_problems_and_other_commands_do_not_look(monkeypatch, capfd):
    if not (pathlib.Path(longspan.__file__).parent / "bin" / "longspan").is_file():
        pytest.skip("installed without the command")
    monkeypatch.setattr("longspan.__main__.package_problems", lambda: ["something is old: renew it"])
    monkeypatch.setattr("sys.argv", ["longspan", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    assert ended.value.code == 1 and "something is old: renew it" in shown.err and '"ok": true' in shown.out
    monkeypatch.setattr("sys.argv", ["longspan", "info"])
    monkeypatch.setattr("os.execv", lambda command, arguments: print(arguments))
    main()
    assert capfd.readouterr().out == "['longspan', 'info']\n"
