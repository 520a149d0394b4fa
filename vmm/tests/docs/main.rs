//! The commands of README and of the how-tos, as a reader pastes them: in order, on a machine that has nothing yet.
//!
//! Each `sh` block says after its language what is to be done with it:
//!
//! - nothing: the block is run, and has to succeed;
//! - `serves`: it is one server, which is started, has to say that it serves, and ends with 0 on SIGTERM when the
//!   document is through;
//! - `not-run: REASON`: it needs what a test does not have. Its `ringdisk` commands are parsed, and it is listed.
//!
//! `<!-- commands: not-run: REASON -->` in a document is for all its blocks that say nothing.

#![expect(clippy::print_stdout, reason = "what is not run is listed")]

mod block;
mod shell;
mod visit;

use std::path::{Path, PathBuf};

use block::{Block, Use};

/// The documents, README first.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let entries = std::fs::read_dir(root.join("docs")).expect("the documents");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        name.starts_with("howto-") && name.ends_with(".md")
    });
    paths.sort();
    paths.insert(0, root.join("README.md"));
    paths
}

fn blocks(path: &Path) -> Vec<Block> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    block::parse(name, &text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn documented_commands_work_as_pasted() {
    let (mut run, mut served) = (0, 0);
    for path in documents() {
        let blocks = blocks(&path);
        visit::document(&blocks).unwrap_or_else(|error| panic!("{error}"));
        run += blocks.iter().filter(|block| block.usage == Use::Run).count();
        served += blocks.iter().filter(|block| block.usage == Use::Serves).count();
    }
    println!("{run} blocks were run, {served} servers started");
    assert!(
        run >= 8 && served >= 8,
        "{run} and {served}: is the Markdown still understood?"
    );
}

#[test]
fn commands_that_cannot_run_here_are_listed_and_parsed() {
    let mut commands = 0;
    for path in documents() {
        for block in blocks(&path) {
            commands += block.check_commands().unwrap_or_else(|error| panic!("{error}"));
            if let Use::NotRun(reason) = &block.usage {
                println!("not run, only parsed: {}, because it {reason}", block.place);
            }
        }
    }
    assert!(
        commands >= 30,
        "{commands} commands: is the Markdown still understood?"
    );
}

/// The control: a document with one fault of each kind is refused with the fault's place.
#[test]
fn broken_commands_are_found() {
    let refused = |text: &str| {
        let blocks = block::parse("x.md", text)?;
        for block in &blocks {
            block.check_commands()?;
        }
        visit::document(&blocks)
    };
    for (text, said) in [
        ("```sh\nringdisk image info none\n```\n", "x.md:1"),
        ("a\n\n```sh\ntrue\nfalse\ntrue\n```\n", "x.md:3"),
        (
            "```sh not-run: needs a guest\nringdisk run --kernel k \\\n  --dsk path=a\n```\n",
            "--dsk",
        ),
        (
            "```sh not-run: needs a guest\ntrue && sudo ringdisk ublk add --disk path=a,sprase=on\n```\n",
            "sprase",
        ),
        (
            "```sh serves\nringdisk vhost-user --socket s --disk path=none\n```\n",
            "cannot open none",
        ),
        ("```sh serves\necho serving\n```\n", "one `ringdisk` command"),
        (
            "```ini\n[Service]\nExecStart=/usr/bin/ringdisk vhost-user --sockt s --disk path=a\n```\n",
            "--sockt",
        ),
        ("```sh guest\ntrue\n```\n", "`guest`"),
        ("```sh not-run:\ntrue\n```\n", "reason"),
        ("```sh\ntrue\n", "not closed"),
    ] {
        let error = refused(text).expect_err(text);
        assert!(error.contains(said), "{text}: {error}");
    }
    refused("1. a\n\n   ```sh\n   true # it's fine\n   ```\n").expect("a good one");
}
