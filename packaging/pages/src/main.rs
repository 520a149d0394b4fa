//! `ringdisk-pages FOLDER` writes the man pages and shell completions there.

use std::path::Path;
use std::process::ExitCode;

#[expect(clippy::print_stderr, reason = "the only output of a program of the build")]
fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("ringdisk-pages: expected a folder to write to");
        return ExitCode::from(2);
    };
    match ringdisk_pages::write(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringdisk-pages: cannot write to {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}
