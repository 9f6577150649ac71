"""Bash as in Megatron-LM's scripts, compared with bash itself; and unsupported syntax."""

from __future__ import annotations

import subprocess

import pytest

from trainer.migrate.expansion import unknown
from trainer.migrate.lexer import ShellError, split_statements
from trainer.migrate.shell import read_commands

SAME_AS_BASH = [
    "show a 'b c' \"d e\" f\\ g",
    "A=1; B=${A}2; show $A $B \"$A-$B\" '$A'",
    "A='x  y'; show $A \"$A\" z$A",
    "A=(1 '2 3' $((2+2)) # a comment\n 5)\nA+=(6); show ${A[@]} ; show \"${A[@]}\" x",
    'A=\'\'; show $A "$A" a""b',
    "A='a '; show ${A}b \"c\"$A",
    "show a \\\n  b # c\nshow d",
    "N=8; M=4; show $((N * M)) $(($N*$M - 1)) $((N / 3)) $(( (N + M) % 5 ))",
    'show ${U:-default} ${U:-"a b"} ${U-}',
    'A=x; show ${A:-y}; A=; show ${A:-y} "${A-z}"',
    "A=1; A+=2; show $A; export B=3 C=4; show $B$C",
    "A=x; if [ $A = x ]; then show yes; else show no; fi",
    'A=x; if [[ $A == y ]]; then show 1; elif [[ $A != z ]] && [ -n "$A" ]; then show 2; else show 3; fi',
    "if [ 3 -gt 4 ] || [ 2 -le 2 ]; then A=in; fi; show $A",
    "if [ a = b ]; then if [ a = a ]; then show 1; fi; show 2; fi; show 3",
    "[ a = a ] && A=1; [ a = b ] && A=2; [ a = b ] || A=${A}3; show $A",
    "A=1 B=2 show ok > /dev/stdout 2>&1",
    'show "a\\$b" \'c\\d\' "e\\"f" "\\n"',
    'show $1 "$@" $#; shift; show $1',
    "(show a; show b)",
    "{ show a; } && show b",
    "eval 'show a' b; A='show c'; eval $A",
    "A=1; command eval A=8; show $A; builtin export B=2; command export A=3; command builtin eval C=4; show $A $B $C",
    "A=1; command A=3 2>/dev/null; show $A; command -v eval >/dev/null",
    "command -- eval 'show x'; command shift; show $1",
    "cat > /dev/null <<EOF\nshow $A 'not closed\nEOF\nshow a",
    "cat <<-'END' > /dev/null; show a\n\tshow b\n\tEND\nshow c",
    "cat <<A <<B > /dev/null\n1\nA\n2\nB\nshow a",
    "cat <<< 'show b' > /dev/null; show a",
    "printf '1\\n2\\n' | while read -r line; do A=$line; done > /dev/null\nshow a",
    "for i in 1 2; do if [ $i = 1 ]; then A=1; fi; done; show a",
    "case x in (y) A=1 ;; x | z) A=2 ;; esac; show a",
    "case x in (y) A=1 ;; x | z) A=2 ;; esac; show $A",
    'S=8B; case "${S}" in\n  "800M")\n    A=1\n    B=2\n    ;;\n  2B|"8B")\n    A=3; B=4\n    ;;\n'
    "  *)\n    exit 1\n    ;;\nesac\nshow $A $B",
    "A=0; case a in b) A=1 ;; c | d) A=2; esac; show $A; case a in a) A=3 ;; a) A=4 ;; *) A=5 ;; esac; show $A",
    "case a in a) if [ a = b ]; then A=1; else A=2; fi ;; *) A=3 ;; esac && B=4; show $A $B",
    "case a in a) (show b; show c); case b in a) A=1 ;; b) A=2 ;; esac ;; *) A=3 ;; esac; show $A",
    "case 'a b' in a) A=1 ;; 'a b') A=2 ;; esac; true && case x in x) B=3 ;; esac; show $A $B",
    "f() { A=$1; }\nfunction g { A=2; }\nshow a",
    "[ a = b ] && { A=1; show b; }\n[ a = b ] && { show c; show d; }\nshow a",
    "if [[ ! -f /none || -d /none ]]; then A=1; fi; show a",
    "shift 1; show $1",
    "show $(( (3 - 10) / 2 )) $(( (3 - 10) % 4 )) $((7 / (2 - 4)))",
    'A=; if [ -z "$A" ]; then show 1; fi; if [ -n "$B" ]; then show 2; fi',
    "N=4611686018427387904; show $((N - 1 + N))",
    'A=(a b c); show $A "$A" "${A[*]}"; A+=x; show "${A[@]}"',
    "A=1; A=2 show x; show $A",
    "A=1; unset A; show ${A:-3}",
    ': ${A:=5} "${B:=6}"; show $A $B ${A:=7}',
    "A=1; show ${A:+--b 2} ${A+c} ${U:+--d} ${U+e} f; if [ -z ${A+x} ]; then A=5; fi; show $A",
    'A=1; if [ -z "${A:+x}" ]; then A=5; fi; show $A',
    "A=x; if [ $A = y ]; then B=1; fi; false && B=2; false || C=3; true && D=4; show ${B:-0} $C $D",
    "A=1; test a = b && A=2; show $A; test a = a && A=3; show $A",
    "show a; [ a = b ] && exit; exit 0; show b",
    "A=1; [ a = b ] && A=2 || A=3; show $A; test a = a && A=4 || A=5; show $A; [ a = b ] || A=6 && A=7; show $A",
    "A=1; [ a = b ] && { A=2; B=2; } || { A=3; B=3; }; show $A $B; { [ a = b ] && A=4; } || A=5; show $A",
    "A=1; ! true && A=2; show $A; ! [ a = b ] && A=3; show $A; false || true || A=4; show $A",
    "A=1; false && if [ a = a ]; then A=2; else A=3; fi || A=$((A + 4)); show $A",
    'A=1; true &&\n  A=2 ||\n  A=3\nshow $A; eval A=4 \'B="5 6"\'; show $A "$B"',
    "f() ( A=2 ); A=1; f; show $A",
    'set -- p "q r"; show $1 "$2" $#; set -- "$@" z; show $3',
    'show $* "$*"',
    "export A=1; A=2; export A=3 B=$A; show $A $B",
    "show $\"a b\" $'c d'",
    "f() { local A=3; }; A=1; f; show $A",
]


@pytest.mark.parametrize("script", SAME_AS_BASH)
def test_as_bash_does(script):
    arguments = ["first one", "second"]
    show = "show() { for word in \"$@\"; do printf '%s\\0' \"$word\"; done; printf '\\n'; }\n"
    bash = subprocess.run(["bash", "-c", show + script, "x", *arguments], capture_output=True, text=True, check=True)
    expected = [["show", *line.split("\0")[:-1]] for line in bash.stdout.splitlines()]
    assert [words for words in read_commands(script, arguments) if words[0] == "show"] == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("show $NAME ${NAME}/x $1", ["show", "<NAME>", "<NAME>/x", "<argument_1>"]),
        ("show $(date) `date` $PWD $(pwd)/x", ["show", "<output_of_date>", "<output_of_date>", ".", "./x"]),
        ("A=1; if [ -f file ]; then A=2; fi; show $A", ["show", "<A>"]),
        ("test -f x && A=2; show $A", ["show", "<A>"]),
        ("mkdir -p x && A=2; show $A", ["show", "2"]),
        ("A=1; grep -q x y && A=2; show $A", ["show", "<A>"]),
        ("A=1; let A=A+2 B=1; show $A $B", ["show", "<A>", "<B>"]),
        ("A=1; ((A++)); show $A", ["show", "<A>"]),
        ("A=1; B=$((A++)); C=$((D=3)); E=$((A == 1)); show $A $D", ["show", "<A>", "<D>"]),
        ("A=(a b); C=${A[1]}; if [ -z $C ]; then B=1; fi; show $B", ["show", "<B>"]),
        ("A=1; [ -f x ] && A=2 || A=3; show $A", ["show", "<A>"]),
        ("A=~/a; show $A ~ ~/b '~' \"~/c\" d~", ["show", "<HOME>/a", "<HOME>", "<HOME>/b", "~", "~/c", "d~"]),
        ("HOME=/h; A=~/a; show $A", ["show", "/h/a"]),
        ('if [ -z "$A" ]; then echo usage; exit 1; fi; show $A', ["show", "<A>"]),
        ('[ -n "$A" ] || exit 1; show $A', ["show", "<A>"]),
        ("A=1; for ((A=0; A<2; A++)); do x; done; show $A", ["show", "<A>"]),
        ("A=1; printf -v A 7; show $A", ["show", "<A>"]),
        ("A=1; declare -i A; A+=1; declare -i B=2+3; show $A $B", ["show", "<A>1", "<B>"]),
        ("A=(a); A[1]=b; show ${A[@]}", ["show", "<A>"]),
        ("A=abc; if [ -z ${A:0:2} ]; then A=5; fi; show $A", ["show", "<A>"]),
        ('A=(a); if [ -n "${A[0]}" ]; then B=1; else B=2; fi; show $B', ["show", "<B>"]),
        ("A=x; if [[ $A == x || a == b && a == c ]]; then B=1; else B=2; fi; show $B", ["show", "<B>"]),
        ("if [[ 010 -eq 8 ]]; then B=1; else B=2; fi; show $B", ["show", "<B>"]),
        ("show $[2*3] $((10#08)) $'a\\tb'", ["show", *(f"<output_of_{x}>" for x in ("_2_3_", "10_08", "a_tb"))]),
        ("show a{b,c} {1..3}", ["show", "a<output_of__b_c_>", "<output_of__1_3_>"]),
        ("f() { A=3; }; A=1; f; show $A", ["show", "<A>"]),
        ("f () { A=3; }; A=1; f x && B=1; show $A $B", ["show", "<A>", "<B>"]),
        ("function f() { show ${2:-d}; }", ["show", "<argument_2>"]),
        ("A=1; (A=2; show $A); show $A", ["show", "<A>"]),
        ("A=1; true | A=2; show $A", ["show", "<A>"]),
        ("A=1; A=2 & show $A", ["show", "<A>"]),
        ("A=1,2; IFS=,; show $A", ["show", "<output_of_1_2>"]),
        ("A=1; while read A; do B=$A; done < hosts; show $A $B", ["show", "<A>", "<B>"]),
        ("for A in 1 2; do B=x$A; done; show $A $B", ["show", "<A>", "<B>"]),
        ("case $1 in a) B=1 ;; *) B=2 ;; esac; show $B", ["show", "<B>"]),
        ("A=1; case $1 in a) A=2 ;; esac; show $A", ["show", "<A>"]),
        ("case abc in a*) A=2 ;; *) A=3 ;; esac; show $A", ["show", "<A>"]),
        ("case a in a) A=1 ;& b) A=2 ;; *) B=2 ;; esac; show $A $B", ["show", "<A>", "<B>"]),
        ("case $1 in *) A=1 ;; esac; show $A", ["show", "1"]),
        ("f() { show $1 $2; }", ["show", "<arguments>", "<argument_2>"]),
        ("[ -f x ] && { A=1; B=2; }; show $A $B", ["show", "<A>", "<B>"]),
        ("while true; do show a; done", ["show", "a"]),
        ("A=1; while [[ $# -gt 0 ]]; do case $1 in -a) A=2; shift;; esac; done; show $A", ["show", "1"]),
        ("A=1; until [ a = a ]; do A=2; done; show $A", ["show", "1"]),
        ("A=1; until [ a = b ]; do A=2; done; show $A", ["show", "<A>"]),
        ("A=1; while [ a = b ] || x; do A=2; done; show $A", ["show", "<A>"]),
        ("A=1; while [ a = b ]; [ a = a ]; do A=2; done; show $A", ["show", "<A>"]),
        ("A=$(date); if [ -z $A ]; then B=1; else B=2; fi; show $B", ["show", "<B>"]),
        ("if [ -f x ]; then A=2; fi; if [ -n $A ]; then B=1; else B=2; fi; show $B", ["show", "<B>"]),
        ("A=llama3; if [[ $A == llama* ]]; then B=1; else B=2; fi; show $B", ["show", "<B>"]),
        ("f() { if [ $# -gt 1 ]; then A=1; fi; show $A; }", ["show", "<A>"]),
        ("show <Specify path>_document", ["show", "<Specify_path>_document"]),
    ],
)
def test_what_is_not_known_becomes_a_word_of_its_own(script, expected):
    assert read_commands(script)[-1] == expected


def test_unknown_is_found_in_a_word():
    assert unknown("a/<NAME>/b") == "<NAME>" and unknown("a b") is None


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("a\nb 'c", "line 2: ' is never closed"),
        ('a "b', 'line 1: " is never closed'),
        ("A=(1\n2", "never closed"),
        ("a ${b", "{ is never closed"),
        ("for a in b; do c", "a block without its `done`"),
        ("f() { a", "a block without its `}`"),
        ("a; done", "line 1: `done` without its loop"),
        ("a\nesac", "line 2: `esac` without its `case`"),
        ("a\nb ;;", "line 2: `;;` without its `case`"),
        ("a\ncat <<EOF\na\n", "line 2: the here-document has no line EOF"),
        ("if [ a = b ]; then c", "without its `fi`"),
        ("fi", "`fi` without its `if`"),
    ],
)
def test_what_is_not_read_is_named_with_its_line(script, text):
    with pytest.raises(ShellError) as caught:
        read_commands(script)
    assert text in str(caught.value)


def test_lines_of_statements():
    assert [(one.words[0], one.line) for one in split_statements("a \\\n b\nc 'd\ne'; f\ng")] == [
        ("a", 1),
        ("c", 3),
        ("f", 4),
        ("g", 5),
    ]


TENFOLD = "A=aaaaaaaaaa\n" + 9 * "A=$A$A$A$A$A$A$A$A$A$A\n"


@pytest.mark.parametrize(
    ("script", "limit"),
    [
        (TENFOLD, "10,000,000 characters"),
        (TENFOLD.replace("A=$A", "A+=$A"), "10,000,000 characters"),
        ("A=(1 2)\n" + 30 * "A+=(${A[@]})\n", "10,000,000 characters"),
        (f"B='{TENFOLD}'; eval \"$B\"", "10,000,000 characters"),
        ("A=aaaaaaaaaa\n" + 200 * f"A+={'a' * 5000}\nshow {20 * '$A'}\n", "10,000,000 characters"),
        ("N=99999999\n" + 14 * "N=$((N * N))\n", "9223372036854775807"),
        ("show $((" + "1+" * 5000 + "1))", "the limit of 1000"),
    ],
)
def test_what_a_script_can_grow_to_is_limited(script, limit):
    with pytest.raises(ShellError, match=limit):
        read_commands(script)


@pytest.mark.parametrize("script", ["show ${" + "9" * 5000 + "}", "[ \u00b2 -gt 1 ] && A=1", "shift " + "9" * 5000])
def test_numbers_that_are_none_of_bash_are_read_past(script):
    assert isinstance(read_commands(script), list)
