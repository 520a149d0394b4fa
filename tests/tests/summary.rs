//! The closing summary of a run: what it counts, and when it fails.

use std::process::{Command, Output};

use lab::Scratch;

const LOG: &str = "
     Running unittests src/lib.rs (target/debug/deps/ringdisk_block-0123456789abcdef)

running 3 tests
test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s

     Running tests/run.rs (target/debug/deps/run-fedcba9876543210)
test result: FAILED. 6 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 75.50s

   Doc-tests block
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";

fn summary(log: &str) -> (String, Output) {
    let scratch = Scratch::new().unwrap();
    let file = scratch.file("log");
    std::fs::write(&file, log).unwrap();
    let output = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/summary.sh"))
        .arg(file)
        .output()
        .expect("bash");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output)
}

#[test]
fn summary_adds_up_suites_and_prints_their_times() {
    let (said, output) = summary(LOG);
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.lines().any(|line| line.trim() == "11 passed, 1 failed"),
        "{said}"
    );
    let times: Vec<_> = said.lines().filter(|line| line.contains(" s ")).collect();
    assert_eq!(
        times,
        [
            "     77.0 s              all suites",
            "     75.5 s     7 tests  run (tests/run.rs)",
            "      1.0 s     2 tests  block (doc tests)",
            "      0.5 s     3 tests  ringdisk_block (src/lib.rs)",
        ]
    );
    assert!(said.contains("1 COULD NOT RUN HERE (1 ignored, 0 for"), "{said}");
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
fn summary_fails_above_one_test_begun_again_and_without_tests() {
    let again = "begun again: a::b, because its guest has not ticked for 31 s\n";
    let (said, output) = summary(&format!("{LOG}\0\n{again}"));
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains(&format!("\n      {again}")), "{said}");
    let (said, output) = summary(&format!("{LOG}{again}\n{again}"));
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("2 BEGUN AGAIN"), "{said}");
    let (said, output) = summary("error: could not compile\n");
    assert!(!output.status.success(), "{said}");
}
