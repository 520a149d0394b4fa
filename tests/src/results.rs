//! The results of a guest: what its script printed, told from the markers of the guest's init (`tests/guest/lab-init`).

/// The word for a guest whose kernel panicked.
pub(crate) const PANICKED: &str = "panicked";

/// The words for a guest that booted again without having been told to.
pub(crate) const RESTARTED: &str = "restarted by itself";

/// The lines from each `@@begin` to the next `@@stop`, and what failed before, of a port where the kernel speaks too.
pub(crate) fn scripts_part(said: &str) -> String {
    let mut inside = false;
    let mut lines = String::new();
    for line in said.split_inclusive('\n') {
        let text = line.trim_end_matches(['\r', '\n']);
        inside |= text == "@@begin";
        if inside || text.starts_with("@@failed") {
            lines.push_str(text);
            // The last line may go on.
            lines.push_str(if line.ends_with('\n') { "\n" } else { "" });
        }
        inside &= text != "@@stop";
    }
    lines
}

/// Splits the results by the markers of the guest's init; the last boot must have ended well.
pub(crate) fn boots(results: &str) -> Result<Vec<Vec<String>>, String> {
    let mut boots = Vec::<Vec<String>>::new();
    let mut stopped = true;
    for line in results.lines() {
        let Some(marker) = line.strip_prefix("@@") else {
            boots
                .last_mut()
                .ok_or("spoke before it began")?
                .push(line.to_owned());
            continue;
        };
        let (word, rest) = marker.split_once(' ').unwrap_or((marker, ""));
        match word {
            "begin" if stopped => {
                boots.push(Vec::new());
                stopped = false;
            }
            "begin" => return Err(RESTARTED.to_owned()),
            "exit" if rest == "0" => {}
            "exit" => return Err(format!("script ended with {rest}")),
            "stop" => stopped = true,
            _ => return Err(format!("failed: {rest}")),
        }
    }
    if boots.is_empty() {
        return Err("never reached its script".to_owned());
    }
    if stopped {
        Ok(boots)
    } else {
        Err("stopped before its script ended".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_splits_results_by_boot() {
        let results = "@@begin\none\ntwo\n@@exit 0\n@@stop\n@@begin\nthree\n@@exit 0\n@@stop\n";
        assert_eq!(boots(results).unwrap(), [vec!["one", "two"], vec!["three"]]);
    }

    #[test]
    fn scripts_part_drops_kernel_messages() {
        let said = "[ 1.0] Linux\r\n@@begin\r\none\r\n@@exit 0\r\n@@stop\r\n[ 2.0] reboot\r\n@@begin\r\ntw";
        assert_eq!(scripts_part(said), "@@begin\none\n@@exit 0\n@@stop\n@@begin\ntw");
        assert_eq!(scripts_part("Linux\n@@failed no disk\n"), "@@failed no disk\n");
    }

    #[test]
    fn boots_reports_a_failed_or_cut_short_script() {
        assert!(boots("@@begin\n@@exit 7\n@@stop\n").unwrap_err().contains('7'));
        assert!(
            boots("@@begin\nwork\n")
                .unwrap_err()
                .contains("before its script ended")
        );
        assert!(
            boots("@@begin\nwork\n@@begin\n")
                .unwrap_err()
                .contains("by itself")
        );
        assert!(
            boots("@@failed no disk appeared\n")
                .unwrap_err()
                .contains("no disk appeared")
        );
        assert!(boots("").unwrap_err().contains("never reached"));
    }
}
