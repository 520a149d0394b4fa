//! Man pages and shell completions of `ringdisk`, made from the definition of its command line, so that neither can say anything
//! else than `--help`.
//!
//! ```text
//!  ringdisk::cli::command() ──▶ FOLDER/ringdisk.1, ringdisk-image-create.1, …     one for each command
//!                           └─▶ FOLDER/ringdisk.bash, _ringdisk, ringdisk.fish
//! ```

use std::fs;
use std::io;
use std::path::Path;

use clap_complete::Shell;

/// The shells that get completions.
pub const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes the pages and completions into `folder`, which is created if it is missing.
///
/// # Errors
///
/// The error of the file system.
pub fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command(), folder)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut command(), "ringdisk", folder)?;
    }
    Ok(())
}

fn command() -> clap::Command {
    vmm::cli::command()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn written() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path()).expect("pages");
        folder
    }

    /// Calls `each` with every command that help shows, and the name of its page.
    fn for_each_command(command: &clap::Command, name: &str, each: &mut impl FnMut(&str, &clap::Command)) {
        each(name, command);
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            for_each_command(command, &format!("{name}-{}", command.get_name()), each);
        }
    }

    #[test]
    fn every_command_has_a_page_that_names_every_option() {
        let folder = written();
        let mut pages = 0;
        for_each_command(&command(), "ringdisk", &mut |name, command| {
            let path = folder.path().join(format!("{name}.1"));
            let page =
                fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            // A minus sign is escaped, so that it stays one.
            let page = page.replace("\\-", "-");
            assert!(page.contains(&format!(".TH {name} 1")), "{name}");
            for option in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                if let Some(long) = option.get_long() {
                    assert!(page.contains(&format!("--{long}")), "{name}: --{long}");
                }
            }
            pages += 1;
        });
        assert!(pages > 30, "{pages}");
        let page = fs::read_to_string(folder.path().join("ringdisk-vhost-user.1")).expect("a page");
        assert!(page.contains("num_queues"), "the keys of --disk are explained");
    }

    #[test]
    fn bash_completes_commands_and_options() {
        let folder = written();
        let completed = |words: &[&str]| {
            let script = format!(
                "source ringdisk.bash; COMP_WORDS=({}); COMP_CWORD={}; _ringdisk ringdisk '{}' x; echo \"${{COMPREPLY[@]}}\"",
                words.join(" "),
                words.len() - 1,
                words[words.len() - 1],
            );
            let output = Command::new("bash")
                .args(["-c", &script])
                .current_dir(folder.path())
                .output()
                .expect("bash is needed by this test");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        assert_eq!(completed(&["ringdisk", "vho"]), "vhost-user");
        assert_eq!(completed(&["ringdisk", "image", "resi"]), "resize");
        assert_eq!(
            completed(&["ringdisk", "vhost-user", "--socket-g"]),
            "--socket-group"
        );
    }

    #[test]
    fn completions_exist_for_each_shell() {
        let folder = written();
        for name in ["ringdisk.bash", "_ringdisk", "ringdisk.fish"] {
            let text = fs::read_to_string(folder.path().join(name)).expect(name);
            assert!(text.contains("socket-group"), "{name}");
        }
    }
}
