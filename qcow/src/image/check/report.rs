//! The findings of a check: exact counts, and the first findings in words.

use serde::Serialize;

use crate::format::ClusterUse;

/// The most findings that a report spells out; the counts go on.
const FINDINGS_MAX: usize = 1000;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Data may be lost or was lost.
    Corruption,
    /// Space is lost.
    Leak,
    /// A structure could not be read.
    Error,
}

/// A fault in the image.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The structure it is in.
    pub structure: ClusterUse,
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// A description of the fault.
    pub message: String,
}

/// The outcome of a check in one word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Nothing is wrong.
    Clean,
    /// Something is corrupt.
    Corrupt,
    /// Nothing but space is lost.
    Leaks,
    /// Parts could not be read.
    Incomplete,
}

impl Verdict {
    /// Returns the exit code of `qemu-img check` for it.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::Incomplete => 1,
            Self::Corrupt => 2,
            Self::Leaks => 3,
        }
    }
}

/// The result of a check. Names as in `qemu-img check --output=json`, where it has them.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckReport {
    /// The image.
    pub filename: String,
    /// Always `qcow2`.
    pub format: &'static str,
    /// The number of corruptions.
    pub corruptions: u64,
    /// The number of leaked clusters.
    pub leaks: u64,
    /// The number of structures that could not be read.
    pub check_errors: u64,
    /// The header says that refcounts may be wrong.
    pub dirty: bool,
    /// The header says that the image is corrupt.
    pub marked_corrupt: bool,
    /// The end of the last used cluster, in bytes.
    pub image_end_offset: u64,
    /// The number of clusters of the guest's disk.
    pub total_clusters: u64,
    /// The number of them that are in this image.
    pub allocated_clusters: u64,
    /// The number of those that are compressed.
    pub compressed_clusters: u64,
    /// The number of clusters that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// The first findings.
    pub findings: Vec<Finding>,
}

impl CheckReport {
    /// Returns the outcome in one word.
    pub fn verdict(&self) -> Verdict {
        match (self.check_errors, self.corruptions, self.leaks) {
            (0, 0, 0) => Verdict::Clean,
            (0, 0, _) => Verdict::Leaks,
            (_, 0, _) => Verdict::Incomplete,
            _ => Verdict::Corrupt,
        }
    }
}

/// The effect of new refcounts on a finding.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Remedy {
    /// New refcounts remove the finding.
    Rebuild,
    /// New refcounts do not help: a reference points to a wrong place.
    None,
}

/// A point in time of [`Findings`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    corruptions: u64,
    leaks: u64,
    check_errors: u64,
    listed: usize,
    blocked: bool,
}

/// Findings while they come in.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    corruptions: u64,
    leaks: u64,
    check_errors: u64,
    list: Vec<Finding>,
    /// The first finding that new refcounts would not repair.
    blocker: Option<Finding>,
}

impl Findings {
    /// Records a corruption.
    pub(crate) fn corruption(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        self.corruptions += 1;
        self.push(Severity::Corruption, structure, offset, remedy, message);
    }

    /// Records a leaked cluster.
    pub(crate) fn leak(&mut self, structure: ClusterUse, offset: u64, message: impl FnOnce() -> String) {
        self.leaks += 1;
        self.push(Severity::Leak, structure, offset, Remedy::Rebuild, message);
    }

    /// Records a structure that could not be read.
    pub(crate) fn error(
        &mut self,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        self.check_errors += 1;
        self.push(Severity::Error, structure, offset, remedy, message);
    }

    /// Records a fact that is no fault by itself, but prevents any repair.
    pub(crate) fn block(&mut self, structure: ClusterUse, offset: u64, message: impl FnOnce() -> String) {
        self.blocker.get_or_insert_with(|| Finding {
            severity: Severity::Corruption,
            structure,
            offset,
            message: message(),
        });
    }

    fn push(
        &mut self,
        severity: Severity,
        structure: ClusterUse,
        offset: u64,
        remedy: Remedy,
        message: impl FnOnce() -> String,
    ) {
        let blocks = remedy == Remedy::None && self.blocker.is_none();
        if !blocks && self.list.len() >= FINDINGS_MAX {
            return;
        }
        let finding = Finding {
            severity,
            structure,
            offset,
            message: message(),
        };
        if blocks {
            self.blocker = Some(finding.clone());
        }
        if self.list.len() < FINDINGS_MAX {
            self.list.push(finding);
        }
    }

    /// Returns the present point, for `rewind`.
    pub(crate) fn mark(&self) -> Mark {
        Mark {
            corruptions: self.corruptions,
            leaks: self.leaks,
            check_errors: self.check_errors,
            listed: self.list.len(),
            blocked: self.blocker.is_some(),
        }
    }

    /// Drops the findings since `mark`.
    pub(crate) fn rewind(&mut self, mark: Mark) {
        self.corruptions = mark.corruptions;
        self.leaks = mark.leaks;
        self.check_errors = mark.check_errors;
        self.list.truncate(mark.listed);
        if !mark.blocked {
            self.blocker = None;
        }
    }

    /// Returns the first finding that new refcounts would not repair.
    pub(crate) fn blocker(&self) -> Option<&Finding> {
        self.blocker.as_ref()
    }

    /// Returns the report with the fields that are about findings.
    pub(crate) fn into_report(self) -> CheckReport {
        CheckReport {
            corruptions: self.corruptions,
            leaks: self.leaks,
            check_errors: self.check_errors,
            findings: self.list,
            ..CheckReport::default()
        }
    }
}
