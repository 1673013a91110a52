"""Progress of a command: lines on stderr where there is no terminal."""

from perf.command import progress


def test_every_step_is_a_line_when_it_begins(capsys):
    with progress(2) as step:
        step("round 1")
        assert capsys.readouterr().err == "[1/2] round 1\n"
        step("round 2")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "[2/2] round 2\n")
