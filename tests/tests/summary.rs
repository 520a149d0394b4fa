//! The closing summary of a run: what it counts, and when it fails.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use lab::Scratch;

const LOG: &str = "
     Running unittests src/lib.rs (target/debug/deps/ringdisk_block-0123456789abcdef)

running 3 tests
test ring::completes ... ok <0.450s>
test ring::waits - should panic ... ok <0.040s>
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s

     Running tests/run.rs (target/debug/deps/run-fedcba9876543210)
test machine_boots ... FAILED <70.126s>
test result: FAILED. 6 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 75.50s

   Doc-tests block
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";

/// The script that runs test binaries, without what a run of all tests has told it.
fn timed() -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/timed.sh"));
    for name in ["BEGUN", "HUNG_SECONDS", "PART", "CARGO_PKG_NAME"] {
        command.env_remove(name);
    }
    command
}

fn summary(log: &str) -> (String, Output) {
    summary_with_steps(log, "")
}

fn summary_with_steps(log: &str, steps: &str) -> (String, Output) {
    let scratch = Scratch::new().unwrap();
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/summary.sh"));
    for (name, text) in [("log", log), ("steps", steps)] {
        if !text.is_empty() {
            std::fs::write(scratch.file(name), text).unwrap();
            command.arg(scratch.file(name));
        }
    }
    let output = command.output().expect("bash");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output)
}

/// The lines between the heading `name` and the next one.
fn section<'said>(said: &'said str, name: &str) -> Vec<&'said str> {
    let lines = said.lines().skip_while(|line| *line != format!("=== {name}"));
    lines
        .skip(1)
        .take_while(|line| !line.starts_with("==="))
        .collect()
}

#[test]
fn summary_adds_up_suites_and_prints_their_times() {
    let (said, output) = summary(LOG);
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.lines().any(|line| line.trim() == "11 passed, 1 failed"),
        "{said}"
    );
    assert_eq!(
        section(&said, "suites"),
        [
            "     77.0 s              all suites",
            "     75.5 s     7 tests  run (tests/run.rs)",
            "      1.0 s     2 tests  block (doc tests)",
            "      0.5 s     3 tests  ringdisk_block (src/lib.rs)",
        ]
    );
    assert!(said.contains("1 COULD NOT RUN HERE (1 ignored, 0 for"), "{said}");
}

#[test]
fn summary_prints_the_slowest_tests_and_the_time_of_each_step() {
    let (said, output) = summary_with_steps(LOG, "setup 0.5\nlint 61.0 80.4\nall 62\n");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        section(&said, "the slowest tests"),
        [
            "     70.1 s  run: machine_boots",
            "      0.5 s  ringdisk_block: ring::completes",
            "      0.0 s  ringdisk_block: ring::waits",
        ]
    );
    assert_eq!(
        section(&said, "steps"),
        [
            "      0.5 s  setup",
            "     61.0 s  lint (80 s of CPU)",
            "     62.0 s  all"
        ]
    );
    let many: String = (0..20)
        .map(|n| format!("test t{n} ... ok <{n}.000s>\n"))
        .collect();
    let (said, _) = summary(&format!(
        "{LOG}     Running tests/x.rs (target/debug/deps/x-01)\n{many}"
    ));
    let slowest = section(&said, "the slowest tests");
    assert_eq!(slowest.len(), 15, "{said}");
    assert_eq!(slowest[1], "     19.0 s  x: t19", "{said}");
}

/// A long log is cut somewhere in its middle, where the reason is.
#[test]
fn summary_ends_with_the_output_of_failed_tests() {
    let long: String = (0..100).map(|n| format!("line {n}\n")).collect();
    let log = format!(
        "{LOG}     Running tests/x.rs (target/debug/deps/x-01)
test good ... ok <0.000s>
test bad ... FAILED <0.100s>

successes:

---- good stdout ----
nobody asks

successes:
    good

failures:

---- bad stdout ----

thread 'bad' panicked at tests/x.rs:7:1:
left:\t1
---- long stdout ----
{long}

failures:
    bad
    long

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
"
    );
    let (said, _) = summary(&log);
    let failures = section(&said, "output of failed tests");
    assert_eq!(
        failures[..5],
        [
            "x: bad",
            "    thread 'bad' panicked at tests/x.rs:7:1:",
            "    left:\t1",
            "x: long",
            "    line 0",
        ],
        "{said}"
    );
    assert_eq!(failures[63..], ["    line 59", "    [...]"], "{said}");
    let (said, _) = summary("test result: ok. 1 passed; 0 failed;\n");
    assert!(!said.contains("=== output"), "{said}");
}

/// The harness prints it only for an unstable option.
#[test]
fn timed_script_prints_a_tests_time() {
    let this = std::env::current_exe().unwrap();
    let output = timed()
        .arg(this)
        .args(["summary_fails_above_two", "--test-threads=1"])
        .output()
        .expect("sh");
    let said = String::from_utf8_lossy(&output.stdout);
    let times = said.lines().filter(|line| {
        line.starts_with("test summary_fails_above_two") && line.contains(" ... ok <") && line.ends_with("s>")
    });
    assert_eq!(times.count(), 1, "{output:?}");
}

#[test]
fn timed_script_takes_the_tests_of_one_part() {
    for (part, package, tests) in [
        ("lab", "ringdisk-tests", 1),
        ("lab", "ringdisk", 0),
        ("others", "ringdisk-tests", 0),
        ("others", "ringdisk", 1),
    ] {
        let output = timed()
            .arg(std::env::current_exe().unwrap())
            .args(["summary_fails_above_two", "--test-threads=1"])
            .envs([("PART", part), ("CARGO_PKG_NAME", package)])
            .output()
            .expect("sh");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        let ran = said.lines().filter(|line| line.contains(" ... ok <")).count();
        assert_eq!(ran, tests, "{part}, {package}: {output:?}");
    }
}

/// The watcher looks every five seconds. What it says of the stacks is of a debugger, here a script.
#[test]
fn timed_script_ends_a_binary_that_hangs_and_says_where() {
    const HANGS: &str = "RINGDISK_TEST_HANGS";
    // The script runs this very test.
    while std::env::var_os(HANGS).is_some() {
        std::thread::park();
    }
    let scratch = Scratch::new().expect("a folder");
    let debugger = scratch.file("gdb");
    std::fs::write(&debugger, "#!/bin/sh\necho \"#0  in the debugger's words\"\n").expect("a script");
    std::fs::set_permissions(&debugger, Permissions::from_mode(0o755)).expect("its permissions");
    let path = std::env::var("PATH").expect("a search path");
    let path = format!("{}:{path}", scratch.file("").display());
    let log = scratch.file("log");
    let begun = scratch.file("begun");
    let status = timed()
        .arg(std::env::current_exe().expect("this program's path"))
        .args(["timed_script_ends", "--test-threads=1"])
        .envs([("PATH", path.as_str()), (HANGS, "1"), ("HUNG_SECONDS", "1")])
        .env("BEGUN", &begun)
        .stdout(File::create(&log).expect("a file"))
        .status()
        .expect("bash");
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status:?}");
    let said = std::fs::read_to_string(&log).expect("the log");
    assert!(said.contains("hung: #0  in the debugger's words\n"), "{said}");
    // A thread has the first fifteen bytes of its test's name; the rest is of the kernel.
    let thread = said
        .lines()
        .find(|line| line.starts_with("hung:   timed_script_en: "));
    assert!(thread.is_some_and(|line| line.contains("futex")), "{said}");
    let began = std::fs::read_to_string(begun).expect("the list");
    assert!(began.contains(": summary-"), "{began}");
    let (said, output) = summary(&format!("{LOG}{said}"));
    assert!(!output.status.success(), "{said}");
    let hung = section(&said, "where tests hung");
    assert!(hung[0].contains(" has printed nothing for "), "{said}");
}

/// A guest's console can contain a NUL, which makes a log binary to `grep`.
#[test]
fn summary_lists_reasons_from_a_log_with_any_byte() {
    let (said, output) = summary(&format!("{LOG}\0\ncannot run here: x, because of y\n"));
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.contains("\n      cannot run here: x, because of y\n"),
        "{said}"
    );
}

#[test]
fn summary_fails_above_two_tests_begun_again_and_without_tests() {
    let again = "begun again: a::b, because its guest has not ticked for 31 s\n";
    let (said, output) = summary(&format!("{LOG}\0\n{again}"));
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains(&format!("\n      {again}")), "{said}");
    let (said, output) = summary(&format!("{LOG}{again}\n{again}{again}"));
    assert!(output.status.success(), "one test, however often: {output:?}");
    assert!(said.contains("1 TESTS BEGUN AGAIN"), "{said}");
    let others = again.replace("a::b", "c::d") + &again.replace("a::b", "e::f");
    let (said, output) = summary(&format!("{LOG}{again}\n{others}"));
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("3 TESTS BEGUN AGAIN"), "{said}");
    let (said, output) = summary("error: could not compile\n");
    assert!(!output.status.success(), "{said}");
}
