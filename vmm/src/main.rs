//! The `ringdisk` program. Everything is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(ringdisk::cli::run(std::env::args_os()))
}
