//! A thread that does for others what their sandbox keeps them from, such as opening files, one thing after the other.
//!
//! Invariant: whoever asks gets an answer, or is told that there will be none.

use std::io;
use std::sync::mpsc;
use std::thread;

type Errand = Box<dyn FnOnce() + Send>;

/// The way to such a thread, which ends with the last of them.
#[derive(Clone, Debug)]
pub(crate) struct Errands(mpsc::Sender<Errand>);

impl Errands {
    /// Starts the thread, as confined as the calling one.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let (sender, errands) = mpsc::channel::<Errand>();
        let run_all = move || errands.into_iter().for_each(|errand| errand());
        thread::Builder::new().name(name.to_owned()).spawn(run_all)?;
        Ok(Self(sender))
    }

    /// Has the thread do this, and does not wait for it.
    pub(crate) fn send(&self, errand: impl FnOnce() + Send + 'static) {
        // Without the thread, which has panicked, it is dropped.
        self.0.send(Box::new(errand)).unwrap_or_default();
    }

    /// Has the thread do this, and waits for what comes of it; `None` if nothing can come any more.
    pub(crate) fn ask<T: Send + 'static>(&self, errand: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (answer, answered) = mpsc::channel();
        // Whoever asked may have gone.
        self.send(move || answer.send(errand()).unwrap_or_default());
        answered.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errands_are_run_in_order_by_the_same_thread() {
        let errands = Errands::start("test").expect("a thread");
        let id = errands.ask(|| thread::current().id());
        assert!(id.is_some() && id != Some(thread::current().id()));
        let (told, heard) = mpsc::channel();
        for number in 0..3 {
            let told = told.clone();
            errands.send(move || told.send(number).expect("we listen"));
        }
        assert_eq!(errands.ask(|| thread::current().id()), id);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn ask_returns_when_no_answer_can_come() {
        let errands = Errands::start("test").expect("a thread");
        assert_eq!(
            errands.ask(|| -> u8 { panic!("this errand fails on purpose") }),
            None
        );
        assert_eq!(errands.ask(|| 1), None, "its thread has ended");
    }
}
